// Runs tvmflow/compiler/threads.c from several threads at once, with errors, nested loops, users that come and go, and a
// child process. `threads LOOPS` prints "ok", or the first fault; `threads LOOPS childless` has no child process.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>
#include <vector>

#include "threads.c"

namespace {

using Values = std::vector<int64_t>;

void require(bool holds, const char* sentence) {
  if (holds) return;
  std::puts(sentence);
  std::fflush(stdout);
  _exit(1);
}

uint32_t latest = 0;

int64_t start(int64_t threads, int64_t spin) {
  const Any arguments[] = {{INTEGER, 0, threads},
                           {INTEGER, 0, spin},
                           {INTEGER, 0, reinterpret_cast<int64_t>(&pthread_create)},
                           {INTEGER, 0, reinterpret_cast<int64_t>(&pthread_join)},
                           {INTEGER, 0, reinterpret_cast<int64_t>(&latest)}};
  Any result{};
  require(__tvm_ffi_tvmflow_start_threads(nullptr, arguments, 5, &result) == 0, "start failed");
  return result.value;
}

void stop() {
  Any result{};
  require(__tvm_ffi_tvmflow_stop_threads(nullptr, nullptr, 0, &result) == 0, "stop failed");
}

int add_places(int task, Group* group, void* closure) {
  Values& values = *static_cast<Values*>(closure);
  for (size_t i = task; i < values.size(); i += group->num_task) values[i] += static_cast<int64_t>(i);
  return 0;
}

int add_places_of_places(int task, Group* group, void* closure) {
  Values inner(50);
  if (__TVMBackendParallelLaunch(add_places, &inner, 0) != 0) return -1;
  Values& values = *static_cast<Values*>(closure);
  for (size_t i = task; i < values.size(); i += group->num_task) values[i] += inner[i % inner.size()];
  return 0;
}

thread_local int raised = 0;

int fail_at_end(int task, Group* group, void*) {
  if (task + 1 < group->num_task) return 0;
  raised = 7;
  return 7;
}

// Runs loops, and checks that every place was reached exactly once and that an error reaches this thread.
void use(int loops, size_t size) {
  for (int loop = 0; loop < loops; ++loop) {
    Values values(size);
    const bool is_nested = loop % 5 == 4;
    const int tasks = loop % 7 == 0 ? 16 : 0;
    const int status = __TVMBackendParallelLaunch(is_nested ? add_places_of_places : add_places, &values, tasks);
    require(status == 0, "a loop without errors failed");
    for (size_t i = 0; i < size; ++i) {
      require(values[i] == static_cast<int64_t>(is_nested ? i % 50 : i), "a place was not reached once");
    }
    if (loop % 11 == 0) {
      raised = 0;
      require(__TVMBackendParallelLaunch(fail_at_end, nullptr, tasks) == 7, "an error was lost");
      require(raised == 7, "the error of another thread was not raised in the caller's");
    }
  }
}

void use_from_threads(int loops, int64_t threads, int64_t spin) {
  require(start(threads, spin) == threads, "there are fewer threads than were requested");
  std::vector<std::thread> callers;
  for (size_t size : {97, 98, 99}) callers.emplace_back(use, loops, size);
  std::thread users([&] {
    for (int i = 0; i < 20; ++i) {
      start(threads, spin);
      stop();
    }
  });
  for (std::thread& caller : callers) caller.join();
  users.join();
  // Calls that still run when the last user stops the threads.
  std::thread late(use, loops, 100);
  stop();
  late.join();
}

void use_in_child() {
  require(start(3, 50) == 3, "there are fewer threads than were requested");
  use(20, 97);
  const pid_t child = fork();
  if (child == 0) {
    use(20, 97);  // on the only thread there is
    require(start(2, 0) == 2, "a child starts no threads");
    use(20, 97);
    stop();
    _exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "the child failed");
  use(20, 97);
  stop();
}

std::atomic<int> waiting{0};

int wait_for_others(int task, Group* group, void* closure) {
  static_cast<std::vector<std::thread::id>*>(closure)->at(task) = std::this_thread::get_id();
  for (++waiting; waiting < group->num_task;) std::this_thread::yield();
  return 0;
}

// The tasks of a loop wait for each other, which ends only where each has a thread.
void use_all_threads(int64_t threads) {
  start(threads, 0);
  std::vector<std::thread::id> threads_of_tasks(threads);
  waiting = 0;
  require(__TVMBackendParallelLaunch(wait_for_others, &threads_of_tasks, 0) == 0, "a loop without errors failed");
  const std::set<std::thread::id> different(threads_of_tasks.begin(), threads_of_tasks.end());
  require(different.size() == static_cast<size_t>(threads), "two tasks that wait for each other had one thread");
  stop();
}

}  // namespace

int main(int count, char** arguments) {
  const int loops = std::atoi(arguments[1]);
  for (const int64_t spin : {0, 50, 4000}) {
    for (const int64_t threads : {1, 2, 3, 8}) use_from_threads(loops, threads, spin);
  }
  if (count == 2) use_in_child();
  use_all_threads(4);
  std::puts("ok");
}
