"""Overlap the collectives of split layers with their matmuls.

Under sequence parallelism every split layer runs two pairs of work: a gather of tokens, then a product; and a product,
then a reduce-scatter of its sums. :mod:`.kinds` lists the backends that run such a pair. :mod:`.pieces` decides into
how many pieces a product is cut. :mod:`.rounds` gives the order in which ranks then exchange shares.
"""
