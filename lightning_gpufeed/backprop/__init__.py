"""Splits backward: the input gradient now, the weight gradient when it suits. Imports no Lightning."""
