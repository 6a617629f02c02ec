"""How Envoy tells the picker of answers: by its access log, many requests in one message.

A script notes what stands in a whole answer; a streamed one passes untouched. The alternative,
further messages of external processing, costs the picker more than to proxy the request: each
message is a turn of gRPC's.
"""

from collections.abc import Mapping
from typing import Any, Final

from router.envoy.names import (
    ASKED_METADATA,
    DESTINATION,
    ENVELOPE,
    EXCHANGE,
    FIRST_BYTE_US,
    KIND,
    LB_METADATA,
    OWN_METADATA,
    REPLICAS,
    SERVED,
    STATUS,
)

_FLUSH_S: Final = 0.05
_TELL_EVERY_S: Final = 1.0
"""So often an answer that is under way is told of: when its first byte came."""
_WHOLE_BYTES: Final = 64 << 10
"""An answer that is not streamed is looked at up to this size."""
# Each tag costs Envoy a fiftieth of the request: the log has all metadata, and other times, anyway.
_TAGS: Final[Mapping[str, str]] = {
    FIRST_BYTE_US: "%COMMON_DURATION(DS_RX_END:US_RX_BODY_BEG:us)%",
}

# In a JSON string the quotes would be escaped, so text of a model about "usage" does not match.
_SCRIPT: Final = f"""
local function metadata(handle, namespace)
  return handle:streamInfo():dynamicMetadata():get(namespace) or {{}}
end

-- Destinations after the first are fallbacks: the request was tried again so many times.
local function served(handle, destinations)
  local endpoint = metadata(handle, "{LB_METADATA}")["{SERVED}"]
  local tries = 0
  for each in string.gmatch(destinations or "", "[^,]+") do
    if each == endpoint then return tries end
    tries = tries + 1
  end
  return 0
end

local function part(text, number)
  for each in string.gmatch(text or "", "[^\\t]+") do
    if number == 0 then return each end
    number = number - 1
  end
end

local function envelope(text)
  local id = string.match(text, '"id"%s*:%s*("resp_[^"\\\\]+")')
  local usage = string.match(text, '.*"usage"%s*:%s*(%b{{}})')
  if id or usage then
    return '{{"id":' .. (id or "null") .. ',"usage":' .. (usage or "null") .. '}}'
  end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local told = metadata(handle, "{ASKED_METADATA}")
  if told["{EXCHANGE}"] == nil then
    local status = headers:get("{STATUS}")
    if status then
      headers:replace(":status", status)
      headers:remove("{STATUS}")
    end
    return
  end
  local tries = served(handle, told["{DESTINATION}"])
  if tries > 0 then
    headers:replace("x-warmroute-replica", part(told["{REPLICAS}"], tries) or "")
    headers:replace("x-warmroute-retries", tostring(tries))
  end
  if string.sub(headers:get("content-type") or "", 1, 16) ~= "application/json" then return end
  local length = tonumber(headers:get("content-length") or "")
  if length == nil or length > {_WHOLE_BYTES} then return end
  local body = handle:body()
  local found = body and body:length() > 0 and envelope(body:getBytes(0, body:length()))
  if found then
    handle:streamInfo():dynamicMetadata():set("{OWN_METADATA}", "{ENVELOPE}", found)
  end
end
"""


def notes_answers() -> dict[str, Any]:
    """Return the filter that notes what the access log is to tell, and sets answers' headers."""
    kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
    script = {"inline_string": _SCRIPT}
    return {"name": "answers", "typed_config": {"@type": kind, "default_source_code": script}}


def answers_log(cluster: str) -> dict[str, Any]:
    """Return the settings of the connection manager by which the picker learns of answers."""
    kind = "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
    common = {
        "log_name": "answers",
        "grpc_service": {"envoy_grpc": {"cluster_name": cluster}},
        "transport_api_version": "V3",
        "buffer_flush_interval": f"{_FLUSH_S:g}s",
        "custom_tags": [{"tag": name, "value": value} for name, value in _TAGS.items()],
    }
    typed = {
        "@type": kind,
        "common_config": common,
        "additional_response_headers_to_log": [KIND],
    }
    return {
        "access_log": [{"name": "picker", "typed_config": typed}],
        "access_log_options": {"access_log_flush_interval": f"{_TELL_EVERY_S:g}s"},
    }
