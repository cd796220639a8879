import socket

import pytest

from api.config import ApiConfig
from api.process import listen


@pytest.fixture
def settings():
    return {"port": 0}


def test_a_free_port_is_written_down_and_kept_over_a_restart(config):
    first = listen(config)
    port = first.getsockname()[1]
    assert (config.run_dir / "http_url").read_text() == f"http://127.0.0.1:{port}\n"
    first.close()
    second = listen(config)
    assert second.getsockname()[1] == port
    second.close()


def test_what_is_written_down_already_is_not_written_again(config):
    """A disk that is full since would lose it: a file is empty before it is written."""
    listen(config).close()
    written = (config.run_dir / "http_url").stat().st_mtime_ns
    listen(config).close()
    assert (config.run_dir / "http_url").stat().st_mtime_ns == written


def test_another_host_is_written_down_though_the_port_is_the_same(config):
    listener = listen(config)
    port = listener.getsockname()[1]
    listener.close()
    listen(ApiConfig(**config.model_dump() | {"host": "127.0.0.2", "port": port})).close()
    assert (config.run_dir / "http_url").read_text() == f"http://127.0.0.2:{port}\n"


def test_a_taken_port_says_what_to_do(config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="choose another --port"):
            listen(ApiConfig(**config.model_dump() | {"port": port}))
        (config.run_dir / "http_url").write_text(f"http://127.0.0.1:{port}\n")
        free = listen(config)
        assert free.getsockname()[1] not in (0, port)
        free.close()
    (config.run_dir / "http_url").write_text("nonsense")
    listen(config).close()
