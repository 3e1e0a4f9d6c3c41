"""The fixture that fills new memory must not change on which device torch makes tensors."""

import pytest
import torch


@pytest.mark.usefixtures("poisoned")
def test_new_memory_is_on_the_default_device():
    with torch.device("meta"):
        assert torch.empty(0).device.type == "meta"
    assert torch.empty(1).isnan().all()
