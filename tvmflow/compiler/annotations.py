"""The annotations by which the schedule rules know the stages of our operators.

They stand on the accumulating block: the kind of kernel, the rows of its tile, the lanes of its vectors, the number of
its leading batch dimensions, whether these share the weights, and the size of Winograd's output tiles.
"""

KERNEL = "tvmflow.kernel"
TILE = "tvmflow.tile"
LANES = "tvmflow.lanes"
LEAD = "tvmflow.lead"
SHARED = "tvmflow.shared"
WINOGRAD = "tvmflow.winograd"
# The dimensions of a product's result that are its rows, where they are not all that follow the batch.
ROWS = "tvmflow.rows"
