"""What the doctor looks at."""

from __future__ import annotations

import pytest
import torch

from fxopt.reporting import environment


def test_doctor_names_the_instructions_for_small_numbers(monkeypatch: pytest.MonkeyPatch):
    def found(told: dict[str, bool], refused: str = "") -> list[str]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
        monkeypatch.setattr(environment, "why_no_static_int8", lambda: refused)
        by_name = {check.name: check.found for check in environment.checks()}
        return [by_name["cpu int8"], by_name["cpu bfloat16"]]

    assert found({"avx512_vnni": True, "amx_int8": True, "amx_bf16": True}) == ["avx512_vnni, amx_int8", "amx_bf16"]
    assert found({}) == ["this PyTorch does not tell"] * 2
    int8, bfloat16 = found({"avx2": True}, "sums overflow")
    assert int8.startswith("none of avx_vnni,") and int8.endswith("int8_static} is refused: sums overflow")
    assert bfloat16 == "none of avx512_bf16, amx_bf16, bf16: it may not be faster"


def test_doctor_goes_on_where_the_cache_cannot_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXOPT_CACHE", f"/{'long' * 100}")
    by_name = {check.name: check.found for check in environment.checks()}
    assert by_name["cached decisions"].startswith("none: the folder cannot be read (")
    assert by_name["cached decisions"].endswith("set FXOPT_CACHE to another one")
