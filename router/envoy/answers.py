"""How Envoy tells the picker of answers: a script notes what is told, the access log carries it.

The alternative, further messages of external processing, costs the picker more than to proxy the
request: each message is a turn of gRPC's, where an access log has many requests in one.
"""

from typing import Any, Final

from router.envoy.names import (
    ANSWER_HEADERS,
    DESTINATION,
    ENVELOPE,
    EXCHANGE,
    FIRST_BYTE_MS,
    LB_METADATA,
    MAX_RETRIES,
    OWN_METADATA,
    REPLICAS,
    SERVED,
)

_FLUSH_S: Final = 0.05
_TELL_EVERY_S: Final = 1.0
"""So often an answer that is under way is told of: when its first byte came."""
_WHOLE_BYTES: Final = 64 << 10
"""An answer that is not streamed is looked at up to this size."""

# Objects of Envoy's are to be asked for anew after each wait for a part of the body. In a JSON
# string the quotes would be escaped, so text of a model about "usage" does not match.
_SCRIPT: Final = f"""
local function own(handle)
  return handle:streamInfo():dynamicMetadata():get("{OWN_METADATA}")
end

local function note(handle, name, value)
  handle:streamInfo():dynamicMetadata():set("{OWN_METADATA}", name, value)
end

-- Destinations after the first are fallbacks: the request was tried again so many times.
local function served(handle)
  local told = handle:streamInfo():dynamicMetadata():get("{LB_METADATA}") or {{}}
  local tries = 0
  for endpoint in string.gmatch(told["{DESTINATION}"] or "", "[^,]+") do
    if endpoint == told["{SERVED}"] then return tries end
    tries = tries + 1
  end
  return 0
end

local function line(text, number)
  for each in string.gmatch(text, "[^\\n]+") do
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

-- Where the picker was sent the body only, what it answers cannot change headers.
function envoy_on_request(handle)
  if own(handle) == nil then handle:body() end
  local told = own(handle)
  if told == nil or told["{EXCHANGE}"] == nil then return end
  local lb = handle:streamInfo():dynamicMetadata():get("{LB_METADATA}")
  handle:headers():replace("{DESTINATION}", lb["{DESTINATION}"])
  handle:headers():replace("{MAX_RETRIES}", told["{MAX_RETRIES}"])
end

function envoy_on_response(handle)
  local told = own(handle)
  if told == nil or told["{EXCHANGE}"] == nil then return end
  local headers = handle:headers()
  for name, value in string.gmatch(told["{ANSWER_HEADERS}"], "([^:\\n]+): ([^\\n]*)") do
    headers:replace(name, value)
  end
  local tries = served(handle)
  if tries > 0 then
    headers:replace("x-warmroute-replica", line(told["{REPLICAS}"], tries) or "")
    headers:replace("x-warmroute-retries", tostring(tries))
  end
  local kind = headers:get("content-type") or ""
  local length = tonumber(headers:get("content-length") or "")
  if string.sub(kind, 1, 17) == "text/event-stream" then
    for chunk in handle:bodyChunks() do
      local size = math.min(chunk:length(), 4096)
      local found = size > 0 and envelope(chunk:getBytes(0, size))
      note(handle, "{FIRST_BYTE_MS}", handle:timestampString())
      if found then note(handle, "{ENVELOPE}", found) end
      break
    end
  elseif string.sub(kind, 1, 16) == "application/json" and length and length <= {_WHOLE_BYTES} then
    local body = handle:body()
    local found = body and body:length() > 0 and envelope(body:getBytes(0, body:length()))
    if found then note(handle, "{ENVELOPE}", found) end
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
    }
    return {
        "access_log": [
            {"name": "picker", "typed_config": {"@type": kind, "common_config": common}}
        ],
        "access_log_options": {"access_log_flush_interval": f"{_TELL_EVERY_S:g}s"},
    }
