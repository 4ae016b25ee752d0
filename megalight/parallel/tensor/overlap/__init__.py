"""Collectives of split layers under the products they belong to.

Two pairs of work meet at every split layer under sequence parallelism: a gather of tokens, then a product; and a
product, then a reduce-scatter of its sums. :mod:`.kinds` names the ways to run such a pair, :mod:`.pieces` says into
how many products one is cut, :mod:`.rounds` in which order ranks then exchange shares.
"""
