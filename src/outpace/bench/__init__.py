"""Measurements as commands. Times are never tested: a figure counts with its machine and its day, in docs/LOG.md.

kernels.py: what a pass of 1 to 16 rows costs beside what the machine could do; shapes.py: models of true sizes with
random weights to measure. Neighbours: everything goes through api.py and the backend; nothing here is used by them.
"""
