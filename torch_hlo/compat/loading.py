"""torch_xla.distributed.parallel_loader: batches come to the device while the step before runs."""

import torch

from torch_hlo.prefetch import Prefetcher

from . import xla_model


class ParallelLoader:
    """`loader` with its batches moved to the device by a thread, `device_prefetch_size` ahead. A
    step ends before every `batches_per_execution`-th batch."""

    def __init__(
        self,
        cpu_loader,
        devices=(),
        batchdim=0,
        batches_per_execution=1,
        loader_prefetch_size=16,
        device_prefetch_size=8,
        host_to_device_transfer_threads=1,
        input_sharding=None,
    ):
        self._loader, self._sharding = cpu_loader, input_sharding
        self._device = torch.device(devices[0])
        self.batches_per_execution = batches_per_execution
        self._running = Prefetcher(cpu_loader, self._move, device_prefetch_size)

    def _move(self, batch):
        specs = self._sharding
        move = xla_model.send_cpu_data_to_device
        if not isinstance(specs, dict):
            found = move(batch, self._device, specs)
            return found[0] if isinstance(batch, torch.Tensor) else found
        if not isinstance(batch, dict):
            raise ValueError("input batch should be a dict when input sharding is a dict.")
        if missing := [k for k in batch if k not in specs]:
            raise KeyError(f"Keys: {missing} are missing from input_sharding.")
        return {k: move(v, self._device, specs[k])[0] for k, v in batch.items()}

    def per_device_loader(self, device):
        for i, batch in enumerate(self._running):
            if i % self.batches_per_execution == 0:
                xla_model.sync()
            yield batch
        xla_model.sync()

    def __len__(self):
        return len(self._loader)

    def close(self):
        self._running.close()


class MpDeviceLoader:
    """A loader whose batches are on `device` already. Options are those of ParallelLoader."""

    def __init__(self, loader, device, **options):
        self._loader = loader
        self._device = device
        self._options = options
        self._running: ParallelLoader | None = None

    def __iter__(self):
        if self._running is not None:
            self._running.close()
        self._running = ParallelLoader(self._loader, [self._device], **self._options)
        return self._running.per_device_loader(self._device)

    def __len__(self):
        return len(self._loader)
