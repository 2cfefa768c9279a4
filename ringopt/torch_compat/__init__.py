"""The one door to private names of torch.

What begins with an underscore in torch, or is under torch.fx.experimental, may change with any minor release. Each such
name that ringopt relies on is handed on by a module here, with a sentence that says what is relied on, and has a test
of that (tests/torch_compat). Differences between torch 2.11, 2.12 and 2.13 are settled here and nowhere else.

A module imports no more of torch than those that import it need: dynamo.py brings all of Dynamo along, inductor.py only
when its functions are called.
"""
