"""Functions of other libraries that Dynamo does not trace, in forms that it does: as operators with rules, or spelled
out in torch."""
