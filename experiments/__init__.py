"""Reproduces published tables and figures with real two-party runs, from one file each.

python -m splitveil.experiments list
python -m splitveil.experiments run NAME --seeds 10 --jobs 2
python -m splitveil.experiments report NAME
"""
