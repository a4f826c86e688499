"""What programs are made of: templates of statements, by group, with the weight of each group.

A name in braces is a slot, which `generate.Slots` fills with what fits the tensors that there are:

    {a} {f} {g}   a tensor; one of floats; one that takes gradients. `x` is what was chosen here
    {l}           a tensor of floats that is no view
    {s}           a tensor that may be resized: it takes no gradients, nor do its views
    {b} {w}       a tensor that broadcasts with x; that expands to the shape of x
    {t} {o}       a tensor that takes no gradients; that shares no memory with x either
    {m}           a mask of the shape of x
    {d} {e}       dimensions of x
    {i} {j}       an index along dimension 0 of x; a slice of it
    {k} {u}       indices along {d}, a vector; the same without duplicates
    {n}           a number of `Slots.NUMBERS`, or one that was read
    {seed}        a number for `make` or a generator
    {dtype} {perm} {sizes} {expanded} {strided} {flat}
"""

from __future__ import annotations

# `name = template`
NEW: dict[str, tuple[int, list[str]]] = {
    "views": (
        14,
        [
            "{a}.t()", "{a}.transpose({d}, {e})", "{a}[{i}]", "{a}[..., {i}]", "{a}[{j}]",
            "{a}[..., {j}]", "{a}.reshape({sizes})", "{a}.view({sizes})", "{a}.unsqueeze({d})",
            "{a}.squeeze()", "{a}.squeeze({d})", "{a}.expand({expanded})", "{a}.flatten()",
            "{a}.select({d}, 0)", "{a}.permute({perm})", "{a}.movedim({d}, {e})",
            "{a}.unfold({d}, 2, 1)", "{a}.unfold({d}, 1, 2)", "{a}.as_strided({strided})",
            "{a}.diagonal()", "{a}.diagonal(1, {d}, {e})", "{a}.chunk(2, {d})[-1]",
            "{a}.split(2, {d})[0]", "{a}.unbind({d})[-1]", "{a}.narrow({d}, 0, 1)", "{a}.detach()",
            "{a}.view_as({a})", "{a}.swapaxes({d}, {e})", "{a}.unflatten({d}, (1, -1))", "{a}.mT",
            "{a}[None]", "{a}[..., None]", "{a}[:, {j}]", "{a}.data", "{a}.real",
            "torch.view_as_real({a})", "torch.atleast_2d({a})", "{a}.T",
            "{f}.view({f}.dtype)", "{a}.view(torch.int32)", "{a}.conj()", "{a}.adjoint()",
        ],
    ),
    "pointwise": (
        10,
        [
            "{a}.abs()", "-{a}", "{a}.relu()", "torch.sigmoid({a})", "torch.tanh({a})",
            "torch.exp({a}.clamp(max=3))", "torch.sin({a})", "{a}.square()", "torch.floor({a})",
            "torch.sign({a})", "{a}.to(torch.{dtype})", "{a}.clamp(-9, 9).to(torch.{dtype})",
            "{a}.clone()", "{a}.contiguous()", "torch.isnan({a})", "{a}.clamp(-1, 1)",
            "torch.nn.functional.gelu({a}.clamp(-9, 9))", "{a}.bool()", "{a} * {n}", "{a} + {n}", "{n} - {a}",
            "{a} / 4", "2 ** {a}.clamp(0, 2)", "{a} ** 2", "{a} > {n}", "{a} <= 0.5",
            "{a}.round()", "{a}.trunc()", "~{a}", "{a}.logical_not()", "{a}.sqrt()", "{a}.rsqrt()",
            "{a}.log()", "{a}.nan_to_num(1)", "{a}.erf()", "torch.zeros_like({a})",
            "torch.full_like({a}, {n})", "{a}.float()", "{a}.double()", "{a}.int()", "{a}.half()",
            "torch.nn.functional.silu({a})", "torch.nn.functional.elu({a})", "{a}.frac()",
            "{a}.type_as({b})", "{a}.clone(memory_format=torch.contiguous_format)", "{a}.fmod(2)",
            "{a} % 3", "{a} // 2", "{a}.angle()", "{a}.sgn()", "torch.clone({a})", "{a}.isinf()",
            "torch.nn.functional.leaky_relu({a})", "torch.nn.functional.softplus({a})",
            "{a}.new_ones({a}.shape)", "{a}.new_full((2,), {n})", "{a}.log1p()", "{a}.expm1()",
            "{a}.reciprocal()", "{a}.acos()", "{a}.atan()", "{a}.deg2rad()", "copy.copy({a})",
        ],
    ),
    "binary": (
        10,
        [
            "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})",
            "torch.minimum({a}, {b})", "{a} < {b}", "{a} == {b}", "torch.where({m}, {a}, {b})",
            "torch.where({m}, {a}, {n})", "torch.add({a}, {b}, alpha=2)", "{a} / ({b}.abs() + 1)",
            "torch.atan2({a}, {b})", "torch.logical_and({a}, {b})", "torch.lerp({a}, {b}, 0.25)",
            "torch.addcmul({a}, {b}, {b})", "{a} & {b}", "{a} ^ {b}", "torch.fmax({a}, {b})",
            "{a} // ({b}.abs() + 1)", "{a} % ({b}.abs() + 1)", "torch.hypot({a}, {b})",
            "{a} != {b}", "torch.rsub({a}, {b})", "torch.copysign({a}, {b})",
            "torch.heaviside({a}, {b})", "torch.logaddexp({f}, {b}.abs())", "torch.xlogy({a}, {b})",
            "torch.clamp({a}, min={b})", "torch.isclose({a}, {b})", "torch.eq({a}, {n})",
            "torch.nn.functional.mse_loss({a}, {b})", "torch.div({a}, 2, rounding_mode='floor')",
            "torch.div({a}, {b}.abs() + 1, rounding_mode='trunc')", "torch.complex({f}, {b})",
        ],
    ),
    "reductions": (
        7,
        [
            "{a}.sum()", "{a}.sum({d})", "{a}.mean()", "{a}.mean({d}, keepdim=True)",
            "{a}.amax({d})", "{a}.max()", "{a}.argmax({d})", "{a}.var()", "{f}.softmax({d})",
            "{a}.any()", "{a}.all({d})", "{a}.prod({d})", "{a}.norm()", "{f}.log_softmax({d})",
            "{a}.sum({d}, keepdim=True)", "{f}.std({d})", "{a}.cumsum({d})", "{a}.max({d})[0]",
            "{a}.min({d})[1]", "{a}.sum(({d}, {e}))", "{a}.sum({d}, dtype=torch.{dtype})",
            "{f}.logsumexp({d})", "{a}.aminmax()[0]", "{a}.count_nonzero({d})", "{a}.amin()",
            "{a}.cumprod({d})", "{a}.cummax({d})[0]", "{f}.norm(1, {d})", "{a}.argmin()",
            "{a}.nansum({d})", "{f}.var({d}, unbiased=False)", "torch.var_mean({f}.clamp(-9, 9), {d})[1]",
            "{a}.mean(dtype=torch.float64)", "{a}.median()", "{a}.logcumsumexp({d})",
        ],
    ),
    "moves": (
        7,
        [
            "torch.cat([{a}, {b}])", "torch.cat([{a}, {a}], {d})", "torch.stack([{a}, {a}], {d})",
            "torch.cat([{a}.reshape(-1), {b}.reshape(-1)])", "{a}.index_select({d}, {k})",
            "torch.nn.functional.pad({a}, (1, 2))", "{a}.tril()", "{a}.triu(1)", "{a}.flip({d})",
            "{a}.roll(1, {d})", "{a}.repeat(2, *[1] * ({a}.dim() - 1))", "{a}[{k0}]", "{a}[{m}]",
            "{a}.sort({d}, stable=True)[0]", "{a}.sort({d}, stable=True)[1]", "{a}.nonzero()",
            "{a}.argsort({d}, stable=True, descending=True)", "{a}.masked_select({m})",
            "{a}.masked_fill({m}, {n})", "{a}.take(ints([0]))", "{a}.topk(1, {d})[0]",
            "{a}.index_add({d}, {k}, {a}.index_select({d}, {k}))", "{a}.unique()",
            "{a}.index_fill({d}, {k}, {n})", "{a}.gather({d}, indices({a}, {d}))",
            "{a}.scatter({d}, indices({a}, {d}), {n})", "{a}[{k0}, ...]", "{a}[..., {k1}]",
            "{a}.scatter_add({d}, indices({a}, {d}), {a})", "{a}[{i}, {k1}]", "{a}[:, None]",
            "{a}.repeat_interleave(2, {d})", "torch.nn.functional.one_hot({k})", "{a}.tile(2)",
            "{a}.diag_embed()", "torch.diag({a})", "{a}.contiguous().select_scatter({a}.select({d}, 0), {d}, 0)",
            "{a}.index_copy({d}, {u}, {a}.index_select({d}, {u}))", "torch.tril(torch.ones_like({a}))",
            "torch.searchsorted({f}.nan_to_num(1).reshape(-1).sort()[0], {a})", "{a}.rot90()", "{a}.diff()",
            "{a}.contiguous().slice_scatter({a}[:1], 0, 0, 1)", "torch.bincount({k})", "{a}.narrow_copy({d}, 0, 1)",
            "torch.arange({a}.numel(), device=dev)", "torch.full({a}.shape, {n}, device=dev)",
            "torch.eye(3, device=dev)", "torch.linspace(0, 1, 5, device=dev)",
            "torch.tensor([1, 2.5], device=dev)", "torch.empty_like({a}).fill_({n})",
        ],
    ),
    "products": (
        3,
        [
            "{a} @ {b}", "{a} @ {a}.mT", "torch.outer({a}.reshape(-1)[:3], {b}.reshape(-1)[:3])",
            "torch.nn.functional.linear({a}, {a}.reshape(-1, {a}.shape[-1]))", "{a}.mT @ {a}",
            "torch.einsum('...i,...i->...', {a}, {a})", "torch.dot({a}.reshape(-1), {a}.reshape(-1))",
            "torch.nn.functional.layer_norm({f}, {f}.shape[-1:])", "{a}.cumsum({d}) @ {a}.mT",
            "torch.nn.functional.normalize({f}, dim={d})", "torch.baddbmm({a}, {a}, {b})",
            "torch.addmm({a}, {b}, {b}.mT)", "torch.nn.functional.cross_entropy({f}[None], {k})",
            "torch.cdist({f}, {f})", "torch.nn.functional.embedding({k}, {f})", "torch.kron({a}, {b})",
        ],
    ),
    "gradients": (
        4,
        [
            "{f}.detach().requires_grad_()", "{f}.detach().clone().requires_grad_()", "{g} * {b}",
            "torch.autograd.grad(({g} * {g}).sum(), {g}, retain_graph=True)[0]", "{g}.grad",
            "torch.autograd.grad({g}.sum(), {g}, retain_graph=True, create_graph=True)[0]",
            "{g}.softmax({d})", "{g}.tanh()", "{g} + {b}", "{g}.exp()", "{g}.clone()", "{g}[{j}]",
            "torch.autograd.grad(({g} ** 3).sum(), {g}, create_graph=True)[0].mul(2)",
        ],
    ),
    "copies": (
        1,
        [
            "copy.deepcopy({a})", "torch.nn.Parameter({f}.detach())",
            "{a}.to('cpu').mul(1).to(dev)", 
            "torch.as_tensor({a})", "{a}.to(dev, torch.float32)", "pickled({a})",
        ],
    ),
}  # fmt: skip

# statements as they are
DO: dict[str, tuple[int, list[str]]] = {
    "writes": (
        12,
        [
            "{a}.add_({n})", "{a}.mul_(2)", "{a}.add_({w})", "{a}.zero_()", "{a}.fill_({n})",
            "{a}.copy_({w})", "{a}[{i}] = {n}", "{a}[..., {j}] = {n}", "{a}[{j}] += 1",
            "{a}.relu_()", "{a}.neg_()", "{a}.sub_({w})", "{a}.clamp_(-2, 2)", "{a}.t_()",
            "{a}.transpose_({d}, {e})", "{a}.unsqueeze_(0)", "{a}.squeeze_()", "{a}.mul_({w})",
            "{a}.masked_fill_({m}, {n})", "{a}.index_fill_({d}, {k}, {n})", "{a}[{k0}] = {n}",
            "{a}.data.mul_(2)", "{a}.div_(2)", "{a}.diagonal().fill_({n})", "{a}[{m}] = {n}",
            "torch._foreach_add_([{a}, {b}], 1)", "{a}.lerp_({w}, 0.5)", "{s}.set_({b})",
            "{a}.addcmul_({w}, {w})", "{s}.resize_(2, 2).fill_(1)", "{a}.expand({expanded})[0].add_(1)",
            "{a}[{j}].copy_({a}.flip(0)[{j}])", "{a}.index_add_({d}, {k}, {a}.index_select({d}, {k}))",
            "{a}.index_copy_({d}, {u}, {a}.index_select({d}, {u}) * 2)", "{a}.masked_scatter_({m}, torch.arange({a}.numel(), device=dev).to({a}.dtype))",
            "{a}.scatter_({d}, indices({a}, {d}), {n})", "{a}.index_put_(({k},), {a}[{k}], True)",
            "{a} += {w}", "{a} *= {n}", "{a} -= 1", "{a}[{j}] *= 2", "{a}.logical_not_()",
            "{a}[{i}], {b}[{i}] = {n}, 2", "{a}.swapaxes({d}, {e})[{j}] = 1", "{a}.cumsum_({d})",
            "{a}.view({sizes}).add_(1)", "{a}.unfold({d}, 1, 1).mul_(2)", "{a}.tril_()",
            "{a}.as_strided({strided}).add_(1)", "{s}.set_()", "{a}.exp_()", "{a}.bitwise_and_(3)",
            "{a}.T[{j}].fill_({n})", "{a}.narrow({d}, 0, 1).zero_()", "{a}.eq_({w})", "{a}.pow_(2)",
            "{a}[..., None].sub_(1)", "{a}.squeeze_({d})", "{a}.floor_()",
            "{a}.data = {b}", "{a}.permute({perm}).copy_({w})", "{a}[None, {j}] = {n}",
        ],
    ),
    "out": (
        3,
        [
            "torch.add({a}, 1, out={a}.detach())", "torch.add({a}, {b}, out={t})", "torch.mul({a}, {n}, out={t})",
            "torch.sum({a}, {d}, out={o})", "torch.cat([{a}, {a}], out={o})", "torch.exp({a}, out={t})",
            "torch.where({m}, {a}, {a}, out={t})", "torch.matmul({a}, {a}.mT, out={o})",
            "torch.max({a}, {d}, out=({o}, empty(torch.int64)))", "torch.clamp({a}, 0, 1, out={t})",
            "torch.add({a}, 1, out=empty({a}.dtype))", "torch.index_select({a}, {d}, {k}, out={o})", "torch.cat([{b}, {a}], out={a}.detach())",
            "torch.stack([{a}, {a}], out={o})", "torch.cumsum({a}, {d}, out={o})",
            "torch.eq({a}, {a}, out={t})", "torch.sort({a}, {d}, out=({o}, empty(torch.int64)))",
        ],
    ),
    "gradients": (
        4,
        [
            "{g}.sum().backward()", "({g} * {g}).sum().backward(retain_graph=True)",
            "{g}.retain_grad()", "{g}.register_hook(lambda t: t * 2)", "{g}.grad = None",
            "{g}.requires_grad_(False)", "{l}.requires_grad_()", "{g}.detach_()",
            "with torch.no_grad():\n    {g}.mul_({n})", "with torch.no_grad():\n    {g} *= 2",
            "{g}.backward(torch.ones_like({g}))", "{g}.mean().backward(inputs=[{g}])",
            "with torch.no_grad():\n    {g}.sub_({g}.grad)", "{g}.mul_(2)", "{g}[{j}] = 0",
            "{g}.grad.zero_()", "{g}.softmax({d}).square().sum().backward()", "{g}.grad.add_(1)",
            "torch.nn.utils.clip_grad_norm_([{g}], 1.0)", "{g}.data.copy_({w})", "{g}.relu_()",
            "with torch.enable_grad():\n    {g}.prod().backward()", "{g}.cumsum({d}).sum().backward()",
        ],
    ),
    "reads": (
        3,
        [
            "log.append({a}.tolist())", "log.append(bool(({a} > {n}).any()))",
            "log.append(str({a}.shape))", "log.append(repr({a}.detach().cpu()))",
            "log.append(float({a}.sum()))", "log.append(torch.equal({a}, {b}))",
            "log.append([t.dtype for t in {a}])", "log.append({a}.is_contiguous())",
            "log.append(len({a}))", "log.append(int({a}.numel()))", "log.append({n} in {a})",
            "if {a}.sum() > {n}:\n    {a} = {a} + 1\nelse:\n    {a} = {a} * 2",
            "while {f}.abs().sum() > 8 and {f}.detach().isfinite().all():\n    {f} = {f} / 2",
            "if bool({m}.any()):\n    {a}[{j}] = {n}", "for t in {a}:\n    log.append(t.sum().item())",
            "if {a}.dim() and {a}.shape[0] > 1:\n    {a} = {a}[1:]",
        ],
    ),
    "state": (
        3,
        [
            "state.count += 1", "state.table['x'] = {a}", "state.history.append({a})",
            "state.total = state.total + {a}.detach().sum()", "state.inner.value = {a}",
            "if state.count % 2:\n    {a} = {a} + state.count", "state.inner.scale *= 0.5",
            "{a} = {a} * state.inner.scale", "{a} = closure({a})", "state.history[-1].mul_(2)",
            "state.table['x'].add_(1)", "if len(state.history) > 1:\n    {a} = state.history.pop(0)",
            "state.table[str(state.count)] = {a}.detach().clone()", "state.inner.value.mul_({n})",
            "del {a}", "{a}, {b} = {b}, {a}", "{a} = {b}", "del state.table['x']",
        ],
    ),
    "python": (
        0,
        [
            "{a} = {a} * gain", "{a} = state.act({a})", "{a} = {a} + state.weights[0]",
            "{a} = {a} * len(state.weights)", "{a} = bump({a})", "{a} = {a} * state.kind",
            "if state.mode == 'train':\n    {a} = {a} * 2", "{a} = {a} + state.ema",
            "if 'b' in state.names:\n    {a} = {a} - 1", "state.weights[0] += 1",
            "for w in state.weights:\n    {a} = {a} + w", "state.weights.append({n})",
            "state.ema = 0.5 * state.ema + state.count", "state.pair = (state.count, {a})",
            "state.count += len(state.names)", "state.total = state.total + state.inner.scale",
            "state.table = {{**state.table, 'y': {a}}}", "state.history = [*state.history, {a}][-2:]",
            "state.inner.value = state.inner.value * {n}", "state.total.add_({a}.detach().sum())",
            "with torch.no_grad():\n    {a} = {a} * 2", "{a} = {a} + state.inner.value.sum()",
            "state.table.setdefault('z', {a})", "state.total = {a}.detach().sum()",
            "state.count = int(gain)", "{a} = torch.where(state.total > {n}, {a}, -{a})",
        ],
    ),
    "random": (
        0,
        [
            "{a} = {a} + (torch.rand_like({f}) * 8).floor()", "torch.manual_seed({seed})",
            "{a} = {a} + torch.randint(0, 9, (1,), device=dev)", "{a} = {a} * torch.bernoulli(torch.full((1,), 0.5, device=dev))",
            "{a} = torch.nn.functional.dropout({f}, 0.5)", "state.total = state.total + (torch.rand((), device=dev) * 8).floor()",
            "{a}.random_(0, 5)", "{f}.bernoulli_(0.5)", "{a} = {a}[torch.randperm({a}.shape[0], device=dev)]",
        ],
    ),
    "steps": (3, ["mark()", "mark(); mark()"]),
    "modules": (
        1,
        [
            "module.step({f})", "module.step({f}.detach())", "log.append(module.loss({f}).item())",
            "module.load(copy.deepcopy(module.net.state_dict()))", "module.net.zero_grad()",
            "module = copy.deepcopy(module)", "module.net.eval()", "module.net.train()",
            "module.rates(0.5)", "module.restart()",
        ],
    ),
}  # fmt: skip
NUMBERS = [
    "2",
    "3",
    "-1",
    "0",
    "0.5",
    "1.5",
    "-0.25",
    "True",
    "1",
    "2.0",
    "7",
    "float('nan')",
    "1j",
]

# what happens before a call of a captured program: to Python's state, and to its arguments `given`.
# `last`: the results of the call before; `before`: its arguments
CHANGES = [
    "state.count += 1", "state.inner.scale = {n}", "state.inner.scale *= 0.5", "gain = {n}",
    "state.inner.value = make({seed}, (2, 3), torch.float32)", "state.inner.value.mul_(2)",
    "state.history.append(make({seed}, (2,), torch.float32))", "state.history.clear()",
    "state.table['x'] = make({seed}, (2, 3), torch.float32)", "state.table.clear()",
    "state.total.add_(1)", "state.total = make({seed}, (), torch.float64)", "state.ema = {n}",
    "bump.__defaults__ = ({n},)", "state.act = torch.abs", "state.act = lambda t: t * {n}",
    "state.weights.append({n})", "state.weights[0] = {n}", "state.weights.reverse()",
    "state.mode = 'eval'", "state.names.add('b')", "type(state).kind = {n}",
    "state.inner = copy.copy(state.inner)", "state.history = state.history[:1]",
    "torch.manual_seed({seed})", "gain = -0.0", "state.ema = float('nan')",
    "module.rates(0.5)", "module.restart()", "module.net.eval()", "module.net.train()",
    "module.net.zero_grad()", "module.net[0].weight.data.mul_(0.5)",
    "module.net[0].bias.requires_grad_(False)", "module.net[0].weight.grad = None",
    "module.optimizer.param_groups[0]['weight_decay'] = 0.5", "module = copy.deepcopy(module)",
    "module.net[0] = torch.nn.Identity()", "module.net[2].weight = module.net[2].weight",
    *["given[{i}] = given[{j}]"] * 3, *["given[{i}] = before[{j}]"] * 3,
    *["given[{i}] = last[{j}]"] * 3, "given[{i}] = given[{j}][:1]", "given[{i}] = given[{j}][1:]",
    "given[{i}] = given[{i}].mT.contiguous().mT", "given[{i}] = given[{i}].double()",
    "given[{i}] = given[{j}].detach().reshape(given[{i}].shape)", "given[{i}] = given[{j}].view_as(given[{i}])",
    "given[{i}] = given[{i}].detach().requires_grad_()", "given[{i}] = torch.cat([given[{i}], given[{i}]])",
    "given[{i}] = torch.cat([given[{i}], given[{i}]])[::2]", "given[{i}] = {n}",
    "given[{i}] = torch.nn.Parameter(given[{i}])", "given[{i}] = given[{i}] * 2",
    "given[{i}] = given[{j}].expand_as(given[{i}])", "given[{i}] = state.inner.value",
    "state.inner.value = given[{i}]", "state.total = last[{i}]", "last[{i}].add_(1)", "before[{i}].add_(1)",
    "given[{i}] = given[{i}].T", "given[{i}] = given[{i}].flip(0)",
]  # fmt: skip
