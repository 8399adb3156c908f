// The store of a process group, as a thread beside the program uses it.
//
// Note [Names of hosts]
// torch looks up the names of both ends of each connection that a TCPStore makes or describes.
// Where the name server is slow each lookup takes seconds. So all models of a process share one
// connection, and nothing asks a store to describe itself.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace zerocore {

struct StoreConnection {
  c10::intrusive_ptr<c10d::Store> store; // without prefix
  std::string address; // empty if it is none of the network
};

// Another connection to the store than the group's, in which other threads may block. Without a
// store if it is of a kind that may call Python, for which the thread that waits may hold the lock.
StoreConnection connect_beside(const c10::intrusive_ptr<c10d::Store>& store);

// Whether this process is the server of a TCPStore, without which no rank can use it. False where
// the system does not tell.
bool serves(const c10::intrusive_ptr<c10d::Store>& store);

} // namespace zerocore
