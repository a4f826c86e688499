"""Passes that make programs smaller or plainer: identities, constants, motion of reshapes and
conversions, legalization.

In and out: a Module. Imports hlo/ and compiler/hlo_pass.py.
"""
