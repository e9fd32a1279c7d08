"""
Functions that resolve and check network addresses, and read numbers from environment variables.

The names of the functions are those of `mindio_ttp.controller_ttp.ttp_utils` in the library MindIO
TFT 7.3.0.
"""

import ipaddress
import socket

from mindio_ttp import environment
from mindio_ttp.controller_ttp import ttp_logger


def input_ip_transform(input_ip: str, max_retries: int = 3) -> str:
    """
    Return the IPv4 address of the host name `input_ip`.

    Return `input_ip` unchanged if it is an address already, or a name that cannot be resolved. At
    most `max_retries` attempts are made to resolve a name.
    """
    if not input_ip or is_valid_ip(input_ip):
        return input_ip
    for _ in range(max_retries):
        try:
            return socket.gethostbyname(input_ip)
        except OSError as error:
            ttp_logger.LOGGER.warning("%s has no address: %s", input_ip, error)
    return input_ip


def is_valid_ip(ip_str: str) -> bool:
    """
    Return whether `ip_str` is an IPv4 or IPv6 address. Return False for a host name.
    """
    return is_valid_ipv4(ip_str) or is_valid_ipv6(ip_str)


def is_valid_ipv4(ip: str) -> bool:
    """
    Return whether `ip` is an IPv4 address.
    """
    return _is_address(socket.AF_INET, ip)


def is_valid_ipv6(ip: str) -> bool:
    """
    Return whether `ip` is an IPv6 address.
    """
    return _is_address(socket.AF_INET6, ip)


def is_zero_ip(ip_str: str) -> bool:
    """
    Return whether `ip_str` is an unspecified address (0.0.0.0 or ::). An unspecified address stands
    for all addresses of a machine.
    """
    try:
        return ipaddress.ip_address(ip_str.strip()).is_unspecified
    except ValueError:
        return False


def get_env_var_int_safely(
    env_var_name: str,
    default_value: int,
    min_value: int | None = None,
    max_value: int | None = None,
) -> int:
    """
    Return the whole number in the environment variable `env_var_name`.

    Return `default_value` if the variable is not set, is not a whole number, or is out of the range
    from `min_value` to `max_value`. None means that the range has no such limit.
    """
    text = environment.text(env_var_name)
    if text is None:
        return default_value
    try:
        number = int(text)
    except ValueError:
        number = None
    low = number is not None and min_value is not None and number < min_value
    high = number is not None and max_value is not None and number > max_value
    if number is None or low or high:
        ttp_logger.LOGGER.warning("%s is %r: %s is used", env_var_name, text, default_value)
        return default_value
    return number


def _is_address(family: socket.AddressFamily, text: str) -> bool:
    try:
        socket.inet_pton(family, text)
    except OSError:
        return False
    return True
