"""Imports in a simulated world: clock, threads, storage and server are simulated, the product is real.

``python -m tests.proofs.simulation`` runs seeds; CONTRIBUTING.md has its use.
"""
