"""
The modules of the package: MindIO's programs import them by these names.
"""

import importlib

import pytest

IMPORTS = {
    "mindio_ttp.framework_ttp.ttp_decorator": [
        "tft_get_repair_type", "tft_report_load_ckpt_step", "get_device", "set_device",
        "get_mindio_export_version", "set_mindio_export_version", "tft_exception_handler",
        "tft_register_exception_handler",
    ],
    "mindio_ttp.controller_ttp.ttp_logger": ["LOGGER", "LEVEL"],
    "mindio_ttp.controller_ttp.ttp_utils": ["is_zero_ip", "input_ip_transform"],
    "mindio_ttp.controller_ttp.ttp_controller": ["tft_init_controller", "tft_destroy_controller"],
    "mindio_ttp.controller_ttp.ttp_mindx_api": ["tft_register_mindx_callback"],
    "mindio_ttp.utils": ["get_l2_hbm_error_time", "tft_can_do_uce_repair"],
    "mindio_ttp.utils.uce_utils": ["get_update_start_end_time", "get_event_time"],
    "mindio_ttp.mindspore_api": [],
}  # fmt: skip
"""By module: what MindSpeed-LLM, MindSpore or MindIO itself import from it."""


@pytest.mark.parametrize("module", IMPORTS)
def test_what_programs_import_from_a_module_is_there(module: str) -> None:
    """
    When a program imports a name by MindIO's path, it gets it.
    """
    found = importlib.import_module(module)
    assert [name for name in IMPORTS[module] if not hasattr(found, name)] == []


def test_a_name_is_one_thing_by_whichever_path() -> None:
    """
    When a name is imported from the package and from its module, both are the same object.
    """
    package = importlib.import_module("mindio_ttp.framework_ttp")
    module = importlib.import_module("mindio_ttp.framework_ttp.ttp_decorator")
    for name in IMPORTS["mindio_ttp.framework_ttp.ttp_decorator"]:
        assert getattr(package, name, getattr(module, name)) is getattr(module, name)


def test_the_logger_takes_messages_as_printf_does(capfd: pytest.CaptureFixture[str]) -> None:
    """
    When a program logs with arguments, they stand in the message; a message that they do not fit is written
    with them beside it.
    """
    logger = importlib.import_module("mindio_ttp.controller_ttp.ttp_logger").LOGGER
    logger.info("rank:%s is at step %d", 3, 7)
    logger.warning("%d of them", "many")
    written = "".join(capfd.readouterr())
    assert "rank:3 is at step 7" in written
    assert "%d of them ('many',)" in written
