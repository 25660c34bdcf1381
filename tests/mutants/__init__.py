"""Mutation testing: which small changes of the code do the tests notice?"""
