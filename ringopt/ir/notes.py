"""What ringopt notes on nodes: the keys of `node.meta` that are not torch's own.

    INPUT          of an input: its name in the program
    SOURCE         of an input: where Dynamo read it from
    PARAMETER      of an input: whether it is a parameter
    CONTENT        of an input: its tensor, where that is part of the program
    OF_PROGRAM     of an input, Dynamo's or that of the flat graph: whether it is part of the program
    STRIDES        of the output node: how each output lies in memory
    MEMORY         of the output node: in which memory each output lies
    VIEW_OF        the place of the operand in whose memory the value lies
    STANDS_FOR     of a value: the node that a write made it of
    UNSEEN         of a write: autograd does not see it, and the gradient of what is written stays as it was
    LET_GO         of a detach: nothing else reads what it is given, whose memory is its own from there on
    WRITTEN        of a write: its target; of a cast with nothing to do: what was cast
    ROWS_OF        the tensor of which a node has the rows that a rank's queries have
    POLICY         of selective checkpointing, to be asked by a partitioner
    PLACEMENT      of a sharded value: how; None where it is on every rank
    WHOLE          the value that all ranks hold together; None where it was no value of the program
    NAMED          what a node is to be called in the finished graph
    SPELLED        of scaled_dot_product_attention: the operator of another library in whose place it stands
    RULED          of an operator of another library: its rule, and the shapes that it was held against
    CHECKPOINTED   of a node of Dynamo's graph: the call of `checkpoint` in whose body it was (WrittenOut)
    WHY_LEFT       of Dynamo's graph: why a branch or a loop of its function is no part of it
    LOOP           of torch's scan, in what torch keeps as "custom": file and place of the loop for which it stands
"""

INPUT = "input"
SOURCE = "source"
PARAMETER = "parameter"
CONTENT = "content"
OF_PROGRAM = "belongs_to_program"
STRIDES = "strides"
MEMORY = "memory"
Memory = tuple[str, int]  # "input" or "output", and the place of the first that lies in it
VIEW_OF = "view_of"
STANDS_FOR = "stands_for"
UNSEEN = "unseen"
LET_GO = "let_go"
WRITTEN = "written"
ROWS_OF = "rows_of"
POLICY = "policy"
PLACEMENT = "placement"
WHOLE = "whole"
NAMED = "named"
SPELLED = "spelled"
RULED = "ruled"
CHECKPOINTED = "checkpointed"
WHY_LEFT = "why_left"
LOOP = "ringopt_loop"
