"""Collectives made of point-to-point messages, one algorithm family a file.

In the order of reading: ``schedule`` (what an algorithm is), ``naive``, ``binomial_tree``, ``ring``,
``direct``, ``butterfly``; ``messages`` and ``perform`` make it happen, ``play`` shows it, ``cost`` says what
it costs, ``algorithms`` names them all, ``functional`` differentiates them.
"""
