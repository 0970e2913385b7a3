"""Alignment finds the ids that both parties have and puts them into one common order.

Neither party learns anything else about the other's ids. An engine holds what outlives one
alignment (worker threads), an exchange the rules of one alignment, a channel moves frames, and
``align`` puts them together. Every channel can be replaced by another.
"""
