import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors here are tiny: on a busy machine waiting for a second thread costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
