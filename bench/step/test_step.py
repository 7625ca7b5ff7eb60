"""pytest-benchmark comparisons: ``pytest bench/step --benchmark-group-by=group``, a group for each method.

On the GPU where there is one.
"""

from dataclasses import replace

import pytest

from bench.device import synchronised
from bench.step import peers

SETTING = peers.setting()
FORMS = [(method, form) for method, forms in peers.METHODS.items() for form in forms]


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_step(benchmark, method, form):
    benchmark.group = f"{method}, {SETTING}"
    # Without benchmarking only whether it runs is asked.
    setting = replace(SETTING, stem="imagenet", n=4) if benchmark.disabled else SETTING
    function = peers.training(method, form, setting)
    if SETTING.device == "cuda":
        function = synchronised(function)
    assert benchmark.pedantic(function, rounds=3, warmup_rounds=1).isfinite()
