"""Published tables and figures, run anew: one declarative file each, real two-party runs.

python -m experiments list
python -m experiments run NAME --seeds 10 --jobs 2
python -m experiments report NAME
"""
