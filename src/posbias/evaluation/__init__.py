"""Accuracy by position: does a model use what stands at each position of its context?"""
