"""The passive party's report: what left, to whom, and what its activations tell of its features.

It has no figure that depends on labels, so that it can be shown to whoever answers for the data.
"""

from splitveil.passive_party.report.page import passive_page, write_passive_report

__all__ = ["passive_page", "write_passive_report"]
