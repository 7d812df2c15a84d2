"""Mutants: the product with one of its checks removed, and the tests that must fail then."""
