#include "plan/dissemination.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <tuple>

namespace zerocore {

namespace {

constexpr size_t kWordBits = 64;

// Unites lists of `width` words. The first word of each is the lowest rank that has the list.
void unite(std::vector<int64_t>& words, const std::vector<int64_t>& others, int64_t width) {
  std::map<std::vector<int64_t>, int64_t> ranks; // by list
  for (const auto& part : {std::span(std::as_const(words)), std::span(others)}) {
    for (size_t i = 0; i < part.size(); i += width) {
      const auto list = part.subspan(i, width);
      const auto [known, _] = ranks.try_emplace({list.begin() + 1, list.end()}, list.front());
      known->second = std::min(known->second, list.front());
    }
  }
  std::map<int64_t, const std::vector<int64_t>*> lists;
  for (const auto& [list, rank] : ranks) {
    lists[rank] = &list;
  }
  words.clear();
  for (const auto& [rank, list] : lists) {
    words.push_back(rank);
    words.insert(words.end(), list->begin(), list->end());
  }
}

} // namespace

ControlMessage ControlMessage::of(MessageKind kind, std::vector<int64_t> words) {
  const auto width = static_cast<int64_t>(words.size());
  return {kind, 0, width, std::move(words)};
}

ControlMessage ControlMessage::of_flags(MessageKind kind, const std::vector<bool>& flags) {
  ControlMessage message{kind, 0, 0, {}};
  message.add_flags(flags);
  return message;
}

void ControlMessage::add_flags(const std::vector<bool>& flags) {
  const size_t first = words.size();
  words.resize(first + 1 + flags.size() / kWordBits);
  for (size_t i = 0; i < flags.size(); ++i) {
    words[first + i / kWordBits] |= static_cast<int64_t>(uint64_t{flags[i]} << i % kWordBits);
  }
  width = static_cast<int64_t>(words.size());
}

std::vector<bool> ControlMessage::flags(size_t count, size_t first) const {
  std::vector<bool> result(count);
  for (size_t i = 0; i < count; ++i) {
    const auto word = static_cast<uint64_t>(words.at(first + i / kWordBits));
    result[i] = (word >> i % kWordBits & 1) != 0;
  }
  return result;
}

void ControlMessage::combine(const ControlMessage& other) {
  if (kind != other.kind || user != other.user || width != other.width) {
    *this = {MessageKind::Different, 0, 0, {}};
  } else if (kind == MessageKind::Lists) {
    unite(words, other.words, width);
  } else {
    const bool are_flags = kind >= MessageKind::AnyFlags;
    const size_t num_numbers = are_flags ? 0
        : kind == MessageKind::Pass      ? std::min(kPassNumbers, words.size())
                                         : words.size();
    for (size_t i = 0; i < words.size(); ++i) {
      const bool is_number = i < num_numbers;
      words[i] = is_number ? std::max(words[i], other.words[i]) : words[i] | other.words[i];
    }
  }
}

int Dissemination::num_hops(int64_t size) {
  int hops = 0;
  for (int64_t reach = 1; reach < size; reach *= 2) {
    ++hops;
  }
  return hops;
}

std::vector<int64_t> Dissemination::peers(int64_t rank, int64_t size) {
  std::set<int64_t> found;
  const Dissemination hops(rank, size, {});
  for (int hop = 0; hop < num_hops(size); ++hop) {
    found.insert({hops.to(hop), hops.from(hop)});
  }
  return {found.begin(), found.end()};
}

std::vector<Dissemination::Connection> Dissemination::connections(int64_t rank, int64_t size) {
  const Dissemination hops(rank, size, {});
  std::map<std::tuple<int, int64_t, int64_t>, Connection> ordered;
  for (int hop = 0; hop < num_hops(size); ++hop) {
    const int64_t distance = int64_t{1} << hop;
    for (const bool sends : {true, false}) {
      const int64_t to = sends ? hops.to(hop) : rank;
      const int64_t from = sends ? rank : hops.from(hop);
      const bool is_short = 2 * distance <= size;
      const int64_t step = is_short ? distance : size - distance;
      const int64_t first = is_short ? from : to;
      ordered[{hop, first / step % 2, first}] = {hop, sends};
    }
  }
  std::vector<Connection> result;
  for (const auto& [_, connection] : ordered) {
    result.push_back(connection);
  }
  return result;
}

} // namespace zerocore
