"""What is behind gmm.grouped_mm: checks, autograd, and the backends that Python calls.

check.py checks a call, autograd.py differentiates it and has the autocast rule, run.py runs what CUTLASS
(csrc/torch/grouped_mm.cpp) does not take, explain.py tells the choice.
"""
