"""Operations that are more than a node: control flow, recurrent networks, attention and other
composites, collectives, optimizers.

In: calls by the user or by PyTorch. Out: tensors, recorded. May import record/, aten/, run/.
"""
