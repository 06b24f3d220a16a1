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
# Of a block of convolutions: lines of the result per strip, and vectors of channels computed at a time.
STRIP = "tvmflow.strip"
CHUNK = "tvmflow.chunk"
# The dot-product instruction of a product of narrow numbers.
DOT = "tvmflow.dot"
# Where a processor's unit for whole tiles may take that product: what it reads and how.
AMX = "tvmflow.amx"
# Vectors of a register tile in the first and the second product of attention.
VECTORS = "tvmflow.vectors"
# Of a transpose of a model's input: the order of its dimensions.
AXES = "tvmflow.axes"
# Of a norm over groups of channels that are not the last dimension: the channels in a group.
GROUP = "tvmflow.group"
# The channels of a convolution's groups, where these are narrower than a vector.
CHANNELS = "tvmflow.channels"
# What the decisions about an operator are about, which measuring may make otherwise.
SUBJECT = "tvmflow.subject"
