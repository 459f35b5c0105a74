"""Accuracy by position: does a model use what stands at each place of its context?"""
