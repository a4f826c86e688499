"""The numbers that decide and were tuned on machines: one table, by what they decide.

A row is a constant: its value, its unit, and what it decides. Above a group stands the command that
measures the group, and the section of benchmarks/notes/measurements.md with the figures of the work
that set it (one thread, CPU time, alternating with PyTorch). Rows below a line `measured=""` have
no figures there: the command above them would measure them. Times are of one core of a Granite
Rapids server (AVX-512, AMX). Limits that follow from an instruction set or from a data structure
stay with their code. Imports nothing."""

# Products: packing and blocks of the caches
#   python -m benchmarks --workloads gpt_train,bert_f32,bert_bf16,mlp_train --threads 1
#   section: Products
KC = 384  # elements of K: a packed block; a tile of A is 24 KB in L1
KC_DIRECT = 256  # elements of K: the same when B is read in place
NC = 512  # columns of 4-byte elements: a packed block of B, 768 KB in L2
LOCAL_GAP = 16  # elements between rows of sums: rows 2 KB apart would share a few sets of L1
PREFETCH = 8  # rows of B that are asked for in advance
LOADS = 1.7  # vectors that a core loads per two multiplications; 2 when it does nothing else
MULTIPLIES_PER_NS = 4.7  # multiply-adds of a lane per nanosecond, in whole products
# nanoseconds of an element that is packed or read again: near, far
PACK_NS = {
    "copy": (0.1, 0.35),
    "transpose": (0.15, 0.3),
    "strided": (1.5, 1.5),
    "direct": (0.03, 0.2),
    "rows": (0.02, 0.1),
    "lanes": (0.02, 0.1),
    "packed": (0.02, 0.06),
}
PREPACK_NS = 0.5  # nanoseconds of an element: to pack all of A beforehand
READ_NS = (0.05, 0.3)  # nanoseconds of an element: to read that again, near and far
NEAR_BYTES = 1 << 20  # bytes of an operand that stay in L2 while its packing runs again and again
# items per core -> share of the time lost by waiting for the last one
IMBALANCE = {1: 0.08, 2: 0.015, 4: 0.0}
L1_BYTES = 32 << 10  # bytes of a block of B that is read again from L1
CALL_CYCLES = 20.0  # cycles around a call of a micro-kernel
# cycles of a row tile per element of K, to pack it
PACK_CYCLES = {
    "copy": 2.0,
    "transpose": 6.0,
    "strided": 40.0,
}
# measured=""
ITEMS_PER_CORE = 4  # items of a parallel step per core
ITEM_WORK = 1 << 18  # multiply-adds that make an item worth its overhead

# Products: which kernel reads the operands how
#   python -m benchmarks --workloads gpt_train,bert_f32,bert_bf16,mlp_train --threads 1
#   section: Products
# bytes of a left operand in L1: rows adjacent in memory are read where they are
IN_LANES_BYTES = 32 << 10
SHALLOW = 64  # elements of K up to which strips of B stay in L1
REREAD = 32  # rows from which on strips of B are read in L1 often enough
CONFLICT_BYTES = 4096  # bytes: rows of A so far apart share one set of L1
# columns of an item from which on A is packed: multiplications take its elements as operands
IN_ROWS = 384
# bytes between rows of B from which on a packed copy is faster than B: without AVX-512, with it
FAR_ROWS_BYTES = 512, 8192
PREFETCH_BYTES = 1024  # bytes that gemv_rows asks for in advance
GEMV_ROWS = 12  # rows: two of w at a time leave registers for as many sums of each
# columns whose sums stay in L1 while K runs: the prefetcher follows pieces of a page or two
GEMV_STRIP = 2048
# measured=""
NARROW_ELEMENTS = 1 << 12  # of a matrix from which on it matters how wide it is read
NARROW_BYTES = 1.5  # bytes per element: a byte, and scales; dot itself reads two well
KEPT_ELEMENTS = 1 << 14  # elements of a constant from which on a packed copy is worth its mark
KEPT_ROWS = 256  # rows up to which packing weighs, but on AMX, where it does longer
# vector instructions from which on an expression is written once, always masked
EXPENSIVE_EPILOGUE = 40
FEW_MERGED_ROWS = 64  # rows of products that are merged
MIN_SHARED = 4  # products with the same right operand that are merged

# Products on AMX tiles
#   python -m benchmarks --workloads bert_bf16,gpt_train --threads 1
#   section: Products
AMX_B_BYTES = 1 << 20  # bytes of L2 for a block of packed B
PANEL_STEPS = 12  # steps of a panel of A: 16 KB of L1
AMX_FINISHED = 128  # columns of sums that an epilogue takes at a time: 16 KB of L1
K_SINGLE = 4096  # elements of K up to which it is one block
K_BLOCK = 1024  # elements of K of a block of a longer one
K_TRANSPOSED = 8192  # elements of K up to which C may be written transposed
AMX_ROWS_AHEAD = 2  # rows of which a call of the micro-kernel asks for what it packs next
LANES_AHEAD = 192  # bytes: rows of lanes are read a line at a time, each from another page
# measured=""
AMX_COLUMNS = 512  # columns of C at a time
AMX_TURNED = 1024  # columns at a time of a product that is computed transposed
AMX_TOGETHER = 4  # tiles of A whose sums are turned together

# Products on GPUs
#   python -m benchmarks.check_gpu --only products
# measured=""
BAND = 8  # rows of blocks whose groups share columns in the second-level cache
FMA_PART_DEPTH = 256  # elements of a part of k, for multiply-adds
MATRIX_PART_BYTES = 512  # bytes of a part of k, for matrix units
GEMV_PART_DEPTH = 512  # elements of a part of k, for few rows
BLOCK_NS = 3500  # nanoseconds to start and end a block
ADD_PARTS_NS = 5000  # nanoseconds of the kernel that adds parts
CACHE_BYTES = 100  # bytes per nanosecond that a multiprocessor gets from the second-level cache
CACHED_BYTES = 25e6  # bytes of an operand that stay in that cache
WARP_SHARE = 0.6  # share of the rate of Hopper's warpgroups that single warps reach there

# Convolutions
#   python -m benchmarks --workloads resnet18_train,resnet18_infer,vit_infer --threads 1
#   section: Convolutions
CONV_B_BYTES = 768 << 10  # bytes of a packed kernel that stay in L2 while the pixels pass
CONV_FINISHED = 256  # columns of a row tile that an epilogue finishes at a time
TABLE_BYTES = 1 << 20  # bytes of a table of pointers on the stack
GRADIENT_BLOCK_BYTES = 1 << 20  # bytes of X and Y that stay in L2
CONV_AMX_GROUP = 8  # row tiles that use a block of the kernel while it is in L2
CONV_MULTIPLY_NS = 0.0135  # nanoseconds of a multiply-add of a direct convolution
WINOGRAD_MULTIPLY_NS = 0.015  # nanoseconds of a multiply-add of minimal filtering
WINOGRAD_FAR_NS = 0.12  # nanoseconds of a multiply-add more, where the kernel does not stay near
WINOGRAD_KERNEL_NS = 12  # nanoseconds of the transform of a weight
WINOGRAD_TILE_NS = 0.2  # nanoseconds of the transforms of a point of a tile
WINOGRAD_TAPS_NS = 4  # nanoseconds of the transform of a weight's gradient
WINOGRAD_PASS_NS = 0.1  # nanoseconds of a pass over a point of a tile
WINOGRAD_FAR_BYTES = 8 << 20  # bytes of a transformed kernel from which on reading it takes time
WINOGRAD_TILES = 56  # tiles of an item: a panel of the kernel that comes from L3 is used this often
WINOGRAD_V_BYTES = 1 << 20  # bytes of transformed inputs of an item
# measured=""
GRADIENT_TILES = 48  # tiles that are transformed at a time for gradients
CONV_AMX_LEAST_RUN = 16  # elements that a tap meets in a row: half a step is zeros then
GRADIENT_AMX_LEAST_RUN = 16  # rows of A: half of a tile's are idle then
COPIED_ROWS_BYTES = 64 << 10  # bytes of the copied rows of a block of a plane
UNROLLED_TAPS = 11  # rows of a window, up to this many, that share what they load
FEW_CHANNELS = 16  # channels: shorter runs are cheaper to copy than to read in place
FEW_PIECES = 36  # sums per pixel that are cheaper than lanes of few features, most of them empty
COPIED = 4  # pixels and features are so many times the copies of a kernel
PACK_DEPTH = 96  # elements of the kernel per output feature that are turned at a time

# Fourier transforms and factorizations
#   python -m benchmarks --workloads core --threads 1 (no transform among them yet)
#   section: Fourier transforms
# bytes between columns and rows that one thread keeps; larger ones are shared
FFT_LOCAL_BYTES = 1 << 18
FFT_MOST = 2048  # points of a line in one piece: two copies of 16 such lines are 512 KB
ONE_TABLE = 1 << 14  # points up to which every element of the matrix has its own twiddle factor
# measured=""
FFT_CHUNK = 256  # vectors of points in an item of `mirror_line`
FFT_LONGEST = 1 << 22  # points of a line that the kernels take
FFT_FEW = 6  # numbers beside each other below which a dimension is transposed first
QR_CHUNK = 64  # columns that a block is applied to at a time: its products stay in L1

# What is fused
#   python -m benchmarks --workloads sum_x_yz,softmax,layernorm_gelu,transposes,adamw_124m
# measured=""
MIN_SIBLING_BYTES = 4096  # bytes of an array that two kernels merge to read once
ROW_LIMIT = 1 << 15  # elements of a row that one thread may walk alone when there are few rows
STRIDED_ROW_LIMIT = 2048  # elements of a row whose neighbours are far apart
# bytes of an array whose lines leave the nearer caches before all elements are read
LARGE = 2 << 20
MAX_MEMBERS = 160  # instructions in a kernel
MAX_INPUTS = 40  # arrays a kernel reads
SEARCH_BUDGET = 200  # groups visited by one cycle check
MAX_SCALARS = 16  # readers of a number whose kernels merge
CHEAP_INDEX = 2  # operations per index that a gather may as well repeat
CHEAP_EXPANSION = 3  # operations per element that are repeated rather than written and read back
FEWER_BYTES = 8  # an expansion is this many times larger than what it is made of

# Loops
#   python -m benchmarks --workloads sum_x_yz,softmax,layernorm_gelu,transposes,adamw_124m
#   section: Kernels that nobody here had seen
STREAM_BYTES = 16 << 20  # bytes of an output from which on it is written past the caches
INSTRUCTION_NS = 0.16  # nanoseconds of a vector instruction that overlaps with its neighbours
STREAMED_BYTES = 4 << 20  # bytes of operands that no second cache holds
AHEAD_BYTES = 2048  # bytes ahead that are asked for: 1 to 8 KB do alike, on one thread and on two
# measured=""
BYTE_NS = 0.02  # nanoseconds of a byte that is read or written
LIGHT_NS = 0.015  # nanoseconds of a cheap operation on an element
HEAVY_NS = 0.2  # nanoseconds of an elementary function of an element
PREFETCHED_ROW = 1024  # elements of a row that is worth asking for ahead of time
STATIC_ELEMENTS = 1024  # elements below which a flat loop has constant bounds and no parallel form
SHORT = 4  # turns of an innermost loop up to which it is written out
SHORT_MOVED = 16  # the same where it reads across vectors, and of several such loops
SHORT_COST = 400  # operations that are written out so
RUNS = 16  # rows of one vector that are written together
RUN_COST = 4  # operations up to which rows of a few elements are moved one by one
SHORT_REDUCED = 16  # elements that a lane folds by itself
LOOP_BLOCK = 8192  # elements of a task where rows are few and long
CHAIN_COST = 40  # operations of a body that alternate, where the processor has no 64-byte vectors
TILE_COST = 12  # operations of a body that is not worth writing out for every row of a tile
STASH_LIMIT = 8192  # elements of a row whose expensive values stay on the stack between passes
STRIDED_ITEMS = 16  # blocks of columns that make a strided reduction worth its short bursts

# Steps, threads and compile time
#   python -m benchmarks.host
#   section: Host and compiler
PARALLEL_PS = 3_000_000  # picoseconds of a loop that is worth waking another thread for
POOL_SPINS = 20000  # turns a worker waits awake, about 0.7 ms: kernels of a program follow sooner
GUEST_SPINS = 1000  # turns of a guest who has not seen a region yet, about 40 us
# nanoseconds after which a worker moves that woke up on the caller's processor
SETTLED_NS = 1_000_000
STREAM_SPINS = 1000  # turns the stream waits awake, about 40 us: what waking up takes
STEPS_PER_FUNCTION = 48  # steps of a function of the entry: compile time stays linear
MODULE_BYTES = 96 << 10  # bytes of IR text per LLVM module: 8 to 16 kernels
# bytes of the first one, which doubles from one to the next; less text is not worth a thread
FIRST_MODULE_BYTES = 8 << 10
# measured=""
RANGE_PS = 4_000_000  # picoseconds that a range of a table of kernels takes at least
# instructions of a program whose last passes take long enough to compile meanwhile
MANY_INSTRUCTIONS = 500
LARGE_SCRATCH = 1 << 20  # bytes of scratch; less stays where other steps have it, too, and caches
