"""Drop-ins for other packages: the same names and arguments, computed by gmm."""
