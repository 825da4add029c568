"""How layers get their numbers."""

from loadpeak.layers import LayerNumbers, NamedModule


def _model(*names: str) -> list[NamedModule]:
    return [NamedModule(name, name, "experts" in name, "attn" not in name) for name in names]


def test_layer_keeps_the_number_its_authors_gave_it() -> None:
    numbers = LayerNumbers()
    layers, moe = numbers.add_model(
        _model("model.embed_tokens", "model.layers.2.qkv", "model.layers.2.mlp.experts", "model.layers.3.qkv")
    )
    assert (layers, moe) == ([2, 3], [2])
    assert numbers.identify("model.layers.3.qkv") == ("model.layers.3.qkv", 3)
    assert numbers.identify("model.embed_tokens") == ("model.embed_tokens", None)


def test_later_stack_and_draft_model_are_numbered_on() -> None:
    numbers = LayerNumbers()
    assert numbers.add_model(_model("visual.blocks.0.attn", "visual.blocks.1.attn", "model.layers.0.qkv"))[
        0
    ] == [
        0,
        1,
        2,
    ]
    assert numbers.add_model(_model("model.layers.0.mlp"))[0] == [3]


def test_expert_number_inside_a_layer_is_not_a_layer() -> None:
    numbers = LayerNumbers()
    assert numbers.add_model(_model("model.layers.5.mlp.experts.7.w1"))[0] == [5]


def test_layer_is_done_with_its_last_first_conversion() -> None:
    numbers = LayerNumbers()
    numbers.add_model(_model("model.layers.0.qkv", "model.layers.0.mlp.experts", "lm_head"))
    assert not numbers.finished("model.layers.0.qkv")
    assert not numbers.finished("model.layers.0.qkv"), "converted again, as online quantization does"
    assert numbers.finished("model.layers.0.mlp.experts")
    assert not numbers.finished("lm_head")
    assert not numbers.finished("never seen")


def test_layer_does_not_wait_for_what_has_no_weights() -> None:
    """Online quantization converts weights as they come, the scales of the KV cache at the end."""
    numbers = LayerNumbers()
    numbers.add_model(_model("model.layers.0.qkv", "model.layers.0.attn"))
    assert numbers.finished("model.layers.0.qkv")
    assert not numbers.finished("model.layers.0.attn")
