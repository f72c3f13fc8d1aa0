"""What an engine says about itself."""

from engine_client import Engine


async def test_model_info_names_model_and_version(engine: Engine) -> None:
    status, info = await engine.get("/model_info")
    assert status == 200
    assert info["weight_version"] == "default"
    assert (info["is_generation"], info["model_type"], info["architectures"]) == (True, "llama", ["LlamaForCausalLM"])
    assert info["model_path"] == info["served_model_name"] == str(engine.models / "a")


async def test_models_are_listed_as_openai_does(engine: Engine) -> None:
    status, listed = await engine.get("/v1/models")
    assert (status, listed["object"]) == (200, "list")
    (card,) = listed["data"]
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "sglang", 1024)
    assert card["id"] == card["root"] == str(engine.models / "a")


async def test_server_info_tells_settings_and_state(engine: Engine) -> None:
    status, info = await engine.get("/server_info")
    assert status == 200
    assert info["max_running_requests"] == 64
    assert len(info["internal_states"]) == 1
    assert info["version"]


async def test_metrics_count_tokens(engine: Engine) -> None:
    await engine.generate({"max_new_tokens": 5, "ignore_eos": True})
    status, text = await engine.get("/metrics")
    assert status == 200
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"):
        assert f"\n{name}{{" in text
