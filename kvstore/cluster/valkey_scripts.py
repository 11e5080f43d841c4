"""What Valkey does in one step, as Lua, and every byte that it keeps for a cluster of kvstore nodes.

All names begin with the name of the cluster, here `kvstore`. Times are those of the server.

    {kvstore:nodes}:lease:SLOT   the lease of a node: JSON of what it says of itself; its time to live is the lease's
    {kvstore:nodes}:ends         sorted set: each slot ever given, by when it may be given again, in ms
    {kvstore:nodes}:names        hash: the slot of each name
    {kvstore:nodes}:owners       hash: `incarnation name` by slot
    {kvstore:nodes}:deletions    hash: the epoch in which each namespace was deleted, by ns_id, a month after the last
    {kvstore:nodes}:joins        sorted set: slots by the number of the join that took them, so that who looks for
                                 what is new since a join reads that alone
    {kvstore:GROUP}:BUCKET       hash: the holders of some boundaries. Field: bytes 2 to 10 of the key. Value: three
                                 bytes for each holder, its slot and the number of the period in which it said so
    {kvstore:GROUP}:marks        hash: by slot, how often that node has written to this group, and in which period last
    kvstore:claim:KEY            `incarnation token` of who computes this block

The first 18 bits of a key say which of 64 groups and of their 4,096 buckets it is in. So small hashes stay listpacks,
some 20 bytes an entry, and groups lie on all shards of a Valkey Cluster. A bucket lives for three periods after the
last word about any of its keys; the first word in a period drops what was not said again for more than two. A period
is half of `entry_seconds`, and each node says all of it once a period.

A mark that is not what its node last wrote tells it that the group was lost, or brought back from some earlier time. It
takes another slot then, so that nothing of its old one counts that came back, and says all of what it holds again. So
it does where somebody wrote to a group a moment ago under the slot that it has just got: after a loss another node may
have had it, which does not know yet.
"""

from __future__ import annotations

# cjson numbers are doubles, so an incarnation is a hexadecimal text. Leases have the hash tag of the declared keys, so
# that they are on the same shard.
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# What no node of ours wrote counts as no lease, so that the next write is over it.
_LEASE = """
local function lease_at(key)
  local text = redis.pcall('GET', key)
  if type(text) ~= 'string' then return nil end
  local is_read, told = pcall(cjson.decode, text)
  if is_read and type(told) == 'table' then return told end
  return nil
end
"""

# A key of another type is none of ours: it is dropped, and what nodes told there they tell again.
_OWN_KEYS = """
for index, kind in ipairs({'zset', 'hash', 'hash', 'zset'}) do
  local found = redis.call('TYPE', KEYS[index]).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', KEYS[index]) end
end
"""

# KEYS: ends, names, owners, joins.
# ARGV: prefix of leases, name, identity, incarnation, lease (JSON), lease ms, reissue ms, slot wanted or '', '1' to
# end the lease of an earlier start. Answers 'taken', 'full', or the slot.
JOIN = (
    _NOW
    + _LEASE
    + _OWN_KEYS
    + """
local ends, names, owners, joins = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local prefix, name, identity, incarnation, value = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local lease_ms, reissue_ms, slot = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local me = incarnation .. ' ' .. name
local before = redis.call('HGET', names, name)
if before then
  local other = lease_at(prefix .. before)
  if other then
    local is_mine = other.incarnation == incarnation
    if not is_mine and (ARGV[9] ~= '1' or other.identity ~= identity) then return 'taken' end
    if not is_mine or before ~= ARGV[8] then
      redis.call('DEL', prefix .. before)
      redis.call('ZADD', ends, now + reissue_ms, before)
    end
  end
end
if slot then
  local free_from = redis.call('ZSCORE', ends, slot)
  if free_from and tonumber(free_from) > now and redis.call('HGET', owners, slot) ~= me then slot = nil end
end
if not slot then
  for _, free in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 1000)) do
    local number = string.find(free, '^%d+$') and tonumber(free)
    if number and number <= 65535 then
      slot = free
      break
    end
    redis.call('ZREM', ends, free)
  end
end
if not slot then
  slot = redis.call('ZCARD', ends)
  while redis.call('ZSCORE', ends, slot) do slot = slot + 1 end
end
slot = tonumber(slot)
if slot > 65535 then return 'full' end
local owner = redis.call('HGET', owners, slot)
if owner then
  local old_name = string.sub(owner, (string.find(owner, ' ', 1, true) or 0) + 1)
  if redis.call('HGET', names, old_name) == tostring(slot) then redis.call('HDEL', names, old_name) end
end
redis.call('SET', prefix .. slot, value, 'PX', lease_ms)
redis.call('ZADD', ends, now + lease_ms + reissue_ms, slot)
redis.call('HSET', names, name, slot)
redis.call('HSET', owners, slot, me)
local last = redis.call('ZREVRANGE', joins, 0, 0, 'WITHSCORES')[2]
redis.call('ZADD', joins, (tonumber(last) or 0) + 1, slot)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, lease_ms + reissue_ms) end
return slot
"""
)

# KEYS: ends, names, owners, joins, lease. ARGV: slot, incarnation, lease (JSON), lease ms, reissue ms. Answers 0 where
# the lease is gone or another's.
RENEW = (
    _NOW
    + _LEASE
    + _OWN_KEYS
    + """
local lease = lease_at(KEYS[5])
if not lease or lease.incarnation ~= ARGV[2] then return 0 end
local lease_ms, reissue_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('SET', KEYS[5], ARGV[3], 'PX', lease_ms)
redis.call('ZADD', KEYS[1], now + lease_ms + reissue_ms, ARGV[1])
for index = 1, 4 do redis.call('PEXPIRE', KEYS[index], lease_ms + reissue_ms) end
return 1
"""
)

# KEYS: ends, lease. ARGV: slot, incarnation, reissue ms.
LEAVE = (
    _NOW
    + _LEASE
    + """
local lease = lease_at(KEYS[2])
if not lease or lease.incarnation ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
return 1
"""
)

# KEYS: ends, names, owners, joins. ARGV: prefix of leases, reissue ms, the last join that is known or ''. Answers the
# number of the last join, then slots, leases and the ms that these have left in turn: of those that joined since, or of
# all the living where none is known or the numbers began anew.
LOOK = (
    _NOW
    + _OWN_KEYS
    + """
local last = redis.call('ZREVRANGE', KEYS[4], 0, 0, 'WITHSCORES')[2] or '0'
local found, since, slots = {last}, tonumber(ARGV[3]), nil
if since and since <= tonumber(last) then
  slots = redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. since, '+inf')
else
  slots = redis.call('ZRANGEBYSCORE', KEYS[1], now + tonumber(ARGV[2]), '+inf')
end
for first = 1, #slots, 1000 do
  local keys = {}
  for at = first, math.min(first + 999, #slots) do keys[#keys + 1] = ARGV[1] .. slots[at] end
  for at, lease in ipairs(redis.call('MGET', unpack(keys))) do
    if lease then
      found[#found + 1] = slots[first + at - 1]
      found[#found + 1] = lease
      found[#found + 1] = redis.call('PTTL', keys[at])
    end
  end
end
return found
"""
)

# KEYS: marks of a group, buckets of it. ARGV: '1' to announce and '0' to withdraw, slot, the least count expected, the
# new one, which is more than all that are expected, period ms, most holders; then for each bucket the number of fields
# and the fields. Answers 1 if the mark was one that is expected: that of the slot's last owner, too, where 0 is.
TELL = (
    _NOW
    + """
local announces, slot, holders_max = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[6])
local period_ms = tonumber(ARGV[5])
local stamp = math.floor(now / period_ms) % 256
local mine = string.char(math.floor(slot / 256), slot % 256)

local function others(value)
  local kept = {}
  for at = 1, #value - 2, 3 do
    local age = (stamp - string.byte(value, at + 2)) % 256
    if age <= 2 and string.sub(value, at, at + 1) ~= mine then kept[#kept + 1] = string.sub(value, at, at + 2) end
  end
  return kept
end

local function put(bucket, field, holders)
  if #holders == 0 then redis.call('HDEL', bucket, field)
  else redis.call('HSET', bucket, field, table.concat(holders)) end
end

-- A key that is no hash is none of ours: it is dropped.
local function own_field(key, field)
  local value = redis.pcall('HGET', key, field)
  if type(value) ~= 'table' then return value end
  redis.call('DEL', key)
  return false
end

local function sweep(bucket)
  if own_field(bucket, '') == string.char(stamp) then return end
  local all = redis.call('HGETALL', bucket)
  for at = 1, #all, 2 do
    local value = all[at + 1]
    if all[at] ~= '' then
      local kept = {}
      for place = 1, #value - 2, 3 do
        if (stamp - string.byte(value, place + 2)) % 256 <= 2 then
          kept[#kept + 1] = string.sub(value, place, place + 2)
        end
      end
      if #kept * 3 < #value then put(bucket, all[at], kept) end
    end
  end
  redis.call('HSET', bucket, '', string.char(stamp))
end

local at = 7
for index = 2, #KEYS do
  local bucket, count = KEYS[index], tonumber(ARGV[at])
  sweep(bucket)
  for place = at + 1, at + count do
    local holders = others(redis.call('HGET', bucket, ARGV[place]) or '')
    if announces then
      if #holders >= holders_max then table.remove(holders, 1) end
      holders[#holders + 1] = mine .. string.char(stamp)
    end
    put(bucket, ARGV[place], holders)
  end
  if redis.call('HLEN', bucket) <= 1 then redis.call('DEL', bucket)
  elseif announces then redis.call('PEXPIRE', bucket, 3 * period_ms) end
  at = at + count + 1
end
local count, told_in = string.match(own_field(KEYS[1], slot) or '0 0', '^(%d+) (%d+)$')
local period, least = math.floor(now / period_ms), tonumber(ARGV[3])
redis.call('HSET', KEYS[1], slot, ARGV[4] .. ' ' .. string.format('%d', period))
redis.call('PEXPIRE', KEYS[1], 3 * period_ms)
if not count or (least == 0 and period - tonumber(told_in) > 2) then return least == 0 and 1 or 0 end
if tonumber(count) >= least and tonumber(count) < tonumber(ARGV[4]) then return 1 else return 0 end
"""
)

# KEYS: deletions. ARGV: how many are kept, ms that they are, then namespaces and epochs in turn. Answers all in turn.
BURY = """
local key, most = KEYS[1], tonumber(ARGV[1])
if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
for at = 3, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', key, ARGV[at]) or 0) or 0
  if before < tonumber(ARGV[at + 1]) then redis.call('HSET', key, ARGV[at], ARGV[at + 1]) end
end
local all = redis.call('HGETALL', key)
if #all > 2 * most then
  local epochs = {}
  for at = 2, #all, 2 do epochs[#epochs + 1] = tonumber(all[at]) or 0 end
  table.sort(epochs, function(one, other) return one > other end)
  for at = 1, #all, 2 do
    if (tonumber(all[at + 1]) or 0) < epochs[most] then redis.call('HDEL', key, all[at]) end
  end
  all = redis.call('HGETALL', key)
end
redis.call('PEXPIRE', key, ARGV[2])
return all
"""

# KEYS: claim. ARGV: `incarnation token`, ms, the value of a claim whose owner is dead or ''. Answers '' where it was
# taken, and what stands otherwise.
CLAIM = """
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and held ~= ARGV[3] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""

# KEYS: claim. ARGV: `incarnation token`, ms.
RENEW_CLAIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: claim. ARGV: `incarnation token`.
RELEASE_CLAIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

ALL = (JOIN, RENEW, LEAVE, LOOK, TELL, CLAIM, RENEW_CLAIM, RELEASE_CLAIM, BURY)
