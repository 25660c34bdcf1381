"""Ranks on several hosts, which are network namespaces."""
