"""Settings that are wrong and hold a secret: the error says what is wrong, and not the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.config_sources import parse_config


@pytest.mark.parametrize(
    "text",
    [
        '[[replica]]\nurl = "http://a"\ntoken = "hidden"',
        '[[replica]]\nurl = "http://a"\ntoken_file = "a"\ntoken_env = "hidden"',
        'allow_replica = [{pattern = "http://a", token = "hidden"}]',
        'replica = "http://x:hidden@h"',
        'replica = ["http://x:hidden@h", 5]',
    ],
)
def test_no_token_that_stands_in_a_config_file_is_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must be a list of texts or of tables") as caught:
        parse_config(["--config", str(path)], {})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://x:hidden@h", "http://x:hidden@h:99999", "http://x:hidden@[h", "ftp://x:hidden@h"],
)
def test_no_login_in_a_replica_url_is_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        parse_config(["--replica", url], {})
    assert "hidden" not in str(caught.value)
