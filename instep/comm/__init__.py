"""Collectives made of point-to-point messages, one algorithm family a file.

In reading order: ``schedule`` (what an algorithm is), ``naive``, ``binomial_tree``, ``ring``, ``direct``,
``butterfly``; ``perform`` runs them over ``messages``, ``play`` shows them with letters, ``cost`` counts
steps and bytes, ``algorithms`` names them all, ``functional`` differentiates them.
"""
