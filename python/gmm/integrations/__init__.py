"""gmm inside other libraries: each module here switches one of them over, and imports it only then.

torchtitan.py is the one that must be imported by name, which is how torchtitan's configuration finds it.
"""

from gmm.integrations import deepspeed, dtensor, transformers

__all__ = ["deepspeed", "dtensor", "transformers"]
