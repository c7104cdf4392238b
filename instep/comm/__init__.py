"""Collectives made of point-to-point messages, one algorithm family a file.

In the order of reading: ``messages`` (all that the algorithms may use), ``naive``, ``binomial_tree``,
``ring``, ``direct``, ``butterfly``; ``cost`` says what each of them sends, ``algorithms`` names them,
``functional`` differentiates them.
"""
