"""The table of everything that changes PyTorch or relies on what it does not promise.

A row is needed (the device, or something that users of PyTorch expect of it, does not work without)
or a shortcut, which `TORCH_HLO_SHORTCUTS` switches off: "0" all, "name,name" all but these.
What a shortcut saves was measured by `python -m test.sweeps.shortcuts NAME` (PyTorch 2.13, two
cores); what saves less than a twentieth is not here."""

from torch_hlo import config
from torch_hlo.frozen import frozen


@frozen
class Row:
    """One change of PyTorch, or one thing relied on."""

    name: str
    where: str  # the file
    what: str
    why: str  # of a shortcut: what would happen without
    saves: str = ""  # of a shortcut: as measured

    @property
    def needed(self) -> bool:
        return not self.saves


ROWS = (
    Row(
        "device_guard",
        "pytorch/registration.py",
        "machine code in the virtual table of PyTorch's device guard for Python back ends",
        "PyTorch asks which device is current in destructors, while an exception is under way: the"
        " guard would enter Python there, which ends the process at Ctrl-C",
    ),
    Row(
        "xla_name",
        "pytorch/registration.py",
        "after torch_hlo.compat.install_as_torch_xla(), a copy of that guard, and kernels, for"
        " PyTorch's device xla",
        "scripts of PyTorch/XLA compare device.type with 'xla', which PyTorch reserves for it",
    ),
    Row(
        "generator",
        "pytorch/patches.py",
        "torch.Generator is a class that makes generators of this device, too",
        'torch.Generator("hlo") has no other hook',
    ),
    Row(
        "module_apply",
        "pytorch/patches.py",
        "nn.Module._apply swaps the contents of parameters when they change the device, also where"
        " somebody refers to them weakly, or the graph of an earlier result has them",
        "optimizers made before `.to` and tied weights keep their parameters",
    ),
    Row(
        "uninitialized",
        "pytorch/uninitialized.py",
        "the parameters of nn.Lazy* modules can be made and materialized on this device",
        "PyTorch tells them by their class, which a tensor of this device cannot have",
    ),
    Row(
        "default_dtype",
        "pytorch/patches.py",
        "torch.set_default_dtype tells the device",
        "what an operator returns for Python's numbers is remembered",
    ),
    Row(
        "trace_as_plain",
        "pytorch/tracing.py",
        "Dynamo takes tensors of this device for plain tensors",
        "a class of tensors with a dispatch of its own ends the graph, or has to show the plain"
        " tensors that it is made of, which the tensors of this device are not",
    ),
    Row(
        "fake_tensors",
        "pytorch/patches.py",
        "fake tensors of this device hold no values",
        "under a FakeTensorMode torch.tensor makes a real tensor of the device",
    ),
    Row(
        "shape_functions",
        "pytorch/patches.py",
        "in PyTorch 2.11 and 2.12, two operators on tensors without data do as in 2.13",
        "results have the shape that PyTorch says: a norm had one dimension too many, and under"
        " torch.compile an encoder layer in evaluation ended with an error",
    ),
    Row(
        "inductor",
        "pytorch/patches.py",
        "torch.compile without backend= compiles graphs on this device's tensors as backend='hlo'",
        "Inductor ends with KeyError: 'hlo', because it writes no code for the device",
    ),
    Row(
        "pin_memory",
        "pytorch/registration.py",
        "any memory of the CPU counts as page-locked",
        "DataLoader(pin_memory=True) and C++ ask for memory that the device does not have",
    ),
    Row(
        "waiting",
        "pytorch/patches.py",
        "methods of ProcessGroup start this device's recorded collectives before they wait with"
        " tensors of the CPU, and destroy_process_group completes them",
        "after `if rank == 0: print(loss.item())`, dist.barrier() would wait for ever: rank 0 waits"
        " for a collective that another one has not begun",
    ),
    Row(
        "saving",
        "lazy/record/serialization.py",
        "torch.save has the values of this device's tensors before it opens the file",
        "a process that is ended while it waits for a step leaves an empty checkpoint",
    ),
    Row(
        "to_dlpack",
        "lazy/record/exchange.py",
        "torch.to_dlpack asks this device's tensors for their memory",
        "C++ would write a capsule without memory",
    ),
    Row(
        "accelerator",
        "pytorch/patches.py",
        "torch.accelerator asks torch.hlo where this device is the accelerator",
        "its own functions want a back end in C++",
    ),
    Row(
        "foreach",
        "pytorch/patches.py",
        "optimizers and clip_grad_norm_ take the class of this device's tensors for fused=True and"
        " for their default",
        "they compare types",
    ),
    Row(
        "autocast",
        "pytorch/autocast.py",
        "kernels of the key AutocastPrivateUse1 for CUDA's lists of operators",
        "PyTorch has such lists for its own devices alone",
    ),
    Row(
        "encoder",
        "lazy/ops/encoder.py",
        "the operators that nn.TransformerEncoder and nn.MultiheadAttention call in evaluation,"
        " nested tensors of padded batches among them",
        "PyTorch takes that way on every registered device",
    ),
    Row(
        "guards",
        "pytorch/guards.py",
        "Dynamo guards on functions of classes, signs of zeros and orders of OrderedDicts, and"
        " leaves generators of random numbers and full deques to Python",
        "it does not notice when those change, and a captured step would be wrong without a word",
    ),
    Row(
        "steps",
        "pytorch/steps.py",
        "Dynamo makes calls of the steps of PyTorch's optimizers, and ends a graph where it would"
        " leave a part of a backward pass out",
        "a whole training step is one graph; without, it is four, and tracing takes seconds",
    ),
    Row(
        "direct_steps",
        "pytorch/steps.py",
        "torch_hlo.compile evaluates Dynamo's guards itself, and calls the bytecode that Dynamo"
        " made",
        "Dynamo prepares each call for graphs that end in the middle",
        "40 us of the 160 that starting a small training step takes",
    ),
    Row(
        "numbers",
        "pytorch/numbers.py",
        "nodes of torch.SymFloat that are no node of torch.fx",
        "a learning rate that changes is an input of the program: PyTorch hands other numbers"
        " through as plain floats",
    ),
    Row(
        "networks",
        "pytorch/tracing.py",
        "Dynamo traces nn.LSTM, GRU and RNN for this back end",
        "torch.compile(fullgraph=True) refuses them",
    ),
    Row(
        "trace_rules",
        "pytorch/tracing.py",
        "Dynamo traces what this package defines, and some functions become graph calls; loops that"
        " PyTorch's operators refuse end the graph (pytorch/steps.py)",
        "it ends graphs there; what PyTorch's operators refuse is an error",
    ),
    Row(
        "backward_thread",
        "pytorch/patches.py",
        "backward of graphs on this device runs on the thread that calls it",
        "the engine's thread numbers the nodes of graphs that it makes by itself: second"
        " derivatives by torch.func came in another order at each call, and were compiled each"
        " time; Ctrl-C waited for the end of backward",
    ),
    Row(
        "dispatch_rule",
        "pytorch/imports.py",
        "nobody has rules for this device's tensors in PyTorch's registry of dispatch rules",
        "C++ asks it for every operator",
        "an eighth of the CPU time of a small step",
    ),
    Row(
        "dtensor",
        "pytorch/imports.py",
        "a stand-in for the class DTensor until that is imported (PyTorch 2.13)",
        "the first operator imports torch.distributed.tensor",
        "0.7 of 1.3 s of CPU time until the first result",
    ),
    Row(
        "dynamo_unneeded",
        "pytorch/imports.py",
        "shape functions that PyTorch hides from Dynamo run without importing it",
        "the first call of one imports Dynamo",
        "1.2 of 1.9 s of CPU time until the first gradients, 41 MB of peak memory; nothing"
        " where an optimizer imports Dynamo",
    ),
    Row(
        "plain_sizes",
        "pytorch/plain_sizes.py",
        "questions about symbolic sizes are answered for numbers",
        "the first question imports sympy",
        "0.5 of 1.2 s of CPU time until the first gradients, 31 MB; nothing where an"
        " optimizer imports Dynamo",
    ),
    Row(
        "operators",
        "pytorch/quick_operators.py",
        "Python's operators record without PyTorch's dispatcher while nobody else takes part",
        "the dispatcher takes as long as recording",
        "35 % of the CPU time of a step of 80 small operators",
    ),
    Row(
        "release_code",
        "device/cpu/trim.py",
        "pages of the code of libtorch and LLVM go back to the system after their last use",
        "static constructors and the compiler touch code that no step uses",
        "74 MB of the peak memory of a small model, 106 MB with an optimizer",
    ),
    Row(
        "openmp",
        "device/cpu/workers.py",
        "programs that torch.compile calls run on PyTorch's OpenMP threads",
        "these spin beside the device's own",
        "16 % of the CPU time of a call of a small model",
    ),
    Row(
        "no_autograd",
        "dynamo/backend.py",
        "Dynamo's graphs are run once on recording tensors instead of AOTAutograd's fake ones",
        "AOTAutograd takes a millisecond per operator",
        "8 % of the CPU time of a small model's first call",
    ),
    Row(
        "direct",
        "dynamo/direct.py",
        "compiled graphs are called without AOTAutograd's Python around them",
        "it looks at every argument and result",
        "30 % of the CPU time of a small model's call with sizes that vary",
    ),
    Row(
        "inductor_unneeded",
        "dynamo/backend.py",
        "AOTAutograd is called, and equal calls are shared, without importing Inductor",
        "both import it, for its log settings and to ask where a graph writes",
        "6 % of the CPU time of a first call with sizes that vary",
    ),
)


def chosen() -> frozenset[str]:
    """The names of rows that TORCH_HLO_SHORTCUTS leaves. Raises ValueError for a name that no
    shortcut has."""
    text = str(config.get("SHORTCUTS"))
    optional = {row.name for row in ROWS if not row.needed}
    if text in ("0", "1"):
        wanted = optional if text == "1" else set()
    else:
        wanted = {name.strip() for name in text.split(",")} - {""}
    if unknown := wanted - optional:
        raise ValueError(
            f"TORCH_HLO_SHORTCUTS={text!r}: no shortcut is named {', '.join(sorted(unknown))};"
            f" there are {', '.join(sorted(optional))}"
        )
    return frozenset(wanted | {row.name for row in ROWS if row.needed})


_ON = chosen()


def on(name: str) -> bool:
    """Whether the shortcut `name` is taken in this process."""
    return name in _ON
