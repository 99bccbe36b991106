"""A GPU for tests that need none of its arithmetic."""

import torch


def on_fake_gpu(module, mode):
    """A module whose weights say they lie on a GPU and hold nothing."""
    with mode, torch.no_grad():
        for part in module.modules():
            for values in (part._parameters, part._buffers):
                values.update({k: mode.from_tensor(v).detach().to("cuda") for k, v in values.items() if v is not None})
    return module
