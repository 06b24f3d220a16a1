"""Names of the annotations by which schedule rules recognise the stages of this project's operators.

An operator sets them on the block that accumulates. A function that comes with its schedule has `KERNEL` as an
attribute of the function, and one that copies a tensor in its order has `RESHAPE`.
"""

# The kind of kernel.
KERNEL = "tvmflow.kernel"
# The operations of a function without blocks, for each row of its first parameter: `doctor` estimates times by them.
OPERATIONS = "tvmflow.operations"
# The function copies a tensor in its order to another shape.
RESHAPE = "tvmflow.reshape"
# The function calls other functions of the library by their symbols.
DIRECT = "tvmflow.direct"
# The places of the arguments that the function checks (`tvmflow.compiler.argument_checks`).
CHECKED = "tvmflow.checked"
# The rows of the kernel's register tile, and the lanes of its vectors.
TILE = "tvmflow.tile"
LANES = "tvmflow.lanes"
# The number of the kernel's leading batch dimensions, and whether these share the weights.
LEAD = "tvmflow.lead"
SHARED = "tvmflow.shared"
# The size of Winograd's output tiles.
WINOGRAD = "tvmflow.winograd"
# The dimensions of a product's result that are its rows. Without it, all dimensions after the batch are.
ROWS = "tvmflow.rows"
# For a block of convolutions: lines and columns of a patch of the result, and vectors of channels computed at a time.
LINES = "tvmflow.lines"
COLUMNS = "tvmflow.columns"
CHUNK = "tvmflow.chunk"
# For a convolution of a block: along the lines and along the columns, the distance of the windows of two neighbouring
# pixels and the size of a window, all in pixels of the input.
WINDOW = "tvmflow.window"
# The dot-product instruction of a product of bfloat16 numbers or 8-bit integers.
DOT = "tvmflow.dot"
# For a product by AMX: the geometry of its kernel (`tvmflow.compiler.amx.Kernel`).
AMX = "tvmflow.amx"
# Vectors of a register tile in the first and the second product of attention.
VECTORS = "tvmflow.vectors"
# For a transpose of a model's input: the order of its dimensions.
AXES = "tvmflow.axes"
# For a norm over groups of channels, where the channels are not the last dimension: the channels in a group.
GROUP = "tvmflow.group"
# The groups of a convolution by Winograd's algorithm, with its packed weights, or by AMX; without it there is one.
GROUPS = "tvmflow.groups"
# For a convolution whose groups are narrower than a vector: the channels of a group, and the stride and the dilation
# along its lines.
NARROW = "tvmflow.narrow"
# The padding of a convolution's image, of zeros: top, left, bottom and right; then its strides and its dilations.
PADDING = "tvmflow.padding"
# For a function that packs weights: the form, and its numbers (`tvmflow.compiler.operators.packing`).
PACKING = "tvmflow.packing"
# The subject of the decisions about an operator (`tvmflow.compiler.choices`).
SUBJECT = "tvmflow.subject"
# For attention of a free number of queries: its plan (`tvmflow.compiler.operators.attention`), by which a second form
# of the function, for a single query, is defined.
SINGLE_QUERY = "tvmflow.single_query"
