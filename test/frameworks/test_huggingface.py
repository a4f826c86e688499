"""Accelerate, the Trainer of transformers, PEFT and safetensors."""

from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def model(dropout: float = 0.0) -> torch.nn.Module:
    transformers.set_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = dict(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config = transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def trainer(folder, net=None, **arguments):
    """One that reports at each of 8 steps."""
    given = dict(output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=2)
    given |= dict(logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
    arguments = transformers.TrainingArguments(**given | dict(learning_rate=1e-2) | arguments)
    texts = Texts()
    return transformers.Trainer(net or model(), arguments, train_dataset=texts, eval_dataset=texts)


def losses(made) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_trainer(tmp_path):
    want = trainer(tmp_path, use_cpu=True)
    want.train()
    got = trainer(tmp_path)
    got.train()
    assert got.args.device.type == "hlo" and want.args.device.type == "cpu"
    assert {p.device.type for p in got.model.parameters()} == {"hlo"}
    assert losses(got) == pytest.approx(losses(want), abs=1e-4)
    assert got.evaluate()["eval_loss"] == pytest.approx(want.evaluate()["eval_loss"], abs=1e-4)
    assert got.predict(Texts()).predictions.shape == (16, 8, 64)


VARIANTS = {
    "bf16": dict(bf16=True),
    "fp16": dict(fp16=True),
    "checkpointing": dict(gradient_checkpointing=True),
    "accumulation": dict(gradient_accumulation_steps=2),
    "workers": dict(dataloader_num_workers=2),
    "compile": dict(torch_compile=True),
    "compile_hlo": dict(torch_compile_backend="hlo"),
    "adafactor": dict(optim="adafactor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name):
    plain = {} if "compile" in name else VARIANTS[name]
    want = trainer(tmp_path, use_cpu=True, **plain)
    want.train()
    got = trainer(tmp_path, **VARIANTS[name])
    got.train()
    assert got.args.device.type == "hlo"
    assert losses(got) == pytest.approx(losses(want), abs=2e-2 if "16" in name else 1e-3)


def test_resume_goes_on_with_the_random_numbers(tmp_path):
    given = dict(save_strategy="steps", save_steps=4)
    whole = trainer(tmp_path, model(0.3), **given)
    whole.train()
    again = trainer(tmp_path, model(0.3), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(again)[-4:] == pytest.approx(losses(whole)[-4:], abs=1e-5)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerate(tmp_path, precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def run(cpu: bool) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 2)
        x = torch.randn(16, 8)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, 0] > 0), 4)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net, optimizer, data = accelerator.prepare(net, optimizer, data)
        seen = []
        for a, b in data:
            loss = torch.nn.functional.cross_entropy(net(a), b.long())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        assert accelerator.device.type == ("cpu" if cpu else "hlo")
        accelerator.save_state(str(tmp_path))
        first = torch.rand(3, device=accelerator.device).tolist()
        accelerator.load_state(str(tmp_path))
        assert torch.rand(3, device=accelerator.device).tolist() == first
        AcceleratorState._reset_state(reset_partial_state=True)
        return seen

    assert run(False) == pytest.approx(run(True), abs=1e-2 if precision == "fp16" else 1e-5)


def test_a_model_is_placed_on_the_device(tmp_path):
    net = model()
    net.save_pretrained(tmp_path)
    for place in ("auto", "hlo"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
        assert {p.device.type for p in loaded.parameters()} == {"hlo"}
    torch.testing.assert_close(loaded.lm_head.weight.cpu(), net.lm_head.weight)
    # what does not fit stays on the CPU, and visits the device
    parted = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={0: "18KB", "cpu": "1GB"}
    )
    assert {*parted.hf_device_map.values()} == {0, "cpu"}
    tokens = torch.arange(4)[None]
    found = parted(tokens.to("hlo")).logits
    torch.testing.assert_close(found.cpu(), net.eval()(tokens).logits)
    pipeline = transformers.pipelines.TextGenerationPipeline
    for device, place in ((None, "hlo"), (-1, "cpu"), ("cpu", "cpu")):
        made = pipeline(model=model(), tokenizer=None, device=device)
        assert made.device.type == made.model.device.type == place


def test_safetensors(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    x = torch.arange(12.0).reshape(3, 4)
    path = str(tmp_path / "x.safetensors")
    save_file({"x": x.to("hlo"), "y": x.bfloat16()}, path)
    loaded = load_file(path, device="hlo")
    assert all(t.device.type == "hlo" for t in loaded.values())
    torch.testing.assert_close(loaded["x"].cpu(), x)
    with safe_open(path, framework="pt", device="hlo:0") as file:
        assert sorted(file.keys()) == ["x", "y"]
        part = file.get_slice("x")[1:, :2]
        assert file.get_slice("x").get_shape() == [3, 4]
    assert part.device.type == "hlo"
    torch.testing.assert_close(part.cpu(), x[1:, :2])


def test_lora():
    peft = pytest.importorskip("peft")
    ids = Texts()[0]["input_ids"][None]

    def run(device: str) -> list[float]:
        settings = dict(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
        net = peft.get_peft_model(model(), peft.LoraConfig(**settings)).to(device)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        seen = []
        for _ in range(3):
            loss = net(input_ids=ids.to(device), labels=ids.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    assert run("hlo") == pytest.approx(run("cpu"), abs=1e-4)
