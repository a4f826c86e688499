"""HLO text: a printer and a parser that read each other, in XLA's syntax.

In: a Module or text. Out: text or a Module. Imports hlo/ir and hlo/sharding.
"""
