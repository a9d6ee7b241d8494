"""Distils a draft of the DFlash family from a target on one machine."""
