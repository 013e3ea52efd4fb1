"""GitOps: the reconciler that brings a fleet to what its branch says, and tells what came of it.

Light on purpose: a poll that finds nothing new imports this and little more.
"""
