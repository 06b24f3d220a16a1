// The worker threads of a compiled library, linked into it: they run the parallel loops in place of TVM's thread pool.
//
// TVM's pool gives each worker a fixed share of a loop, and the caller waits for every one of them, also for a worker
// that the operating system does not run because the machine is busy. Here the tasks of a loop are taken, one by one, by
// the caller and by the workers that are awake. The caller waits for tasks that a worker has begun and for nothing else.
//
// A library has one pool. It serves one caller at a time: a second caller, and a parallel loop within a parallel loop,
// run on their own thread. A child process has no workers until it starts some.
//
// The file is valid C and C++. It refers to no function of the thread library, whose symbol versions would tie the
// compiled library to the C library of the machine that links it: `tvmflow_start_threads` is given their addresses.
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXPORT __attribute__((visibility("default")))
#define LINE __attribute__((aligned(64)))

enum { MOST_THREADS = 1024, INTEGER = 1 /* kTVMFFIInt */, PAUSES = 8 };

// TVM's TVMParallelGroupEnv, FTVMParallelLambda and TVMFFIAny.
typedef struct {
  void* sync_handle;
  int32_t num_task;
} Group;
typedef int (*Body)(int task, Group* group, void* closure);
typedef struct {
  int32_t type_index;
  uint32_t padding;
  int64_t value;
} Any;

// The addresses of pthread_create and pthread_join; `pthread_t` is `unsigned long` on Linux.
typedef int (*Create)(unsigned long* thread, const void* attributes, void* (*run)(void*), void* argument);
typedef int (*Join)(unsigned long thread, void** result);

// The function that a parallel loop calls. TVM's loader sets it to TVM's own when it loads the library.
EXPORT __attribute__((weak)) int (*__TVMBackendParallelLaunch)(Body body, void* closure, int tasks) = NULL;

// The present loop. `ticket` is its number (the upper half), the number of its tasks and the next task (16 bits each).
// Whoever has taken a task may read `body`, `closure` and `group`: they change only when all tasks are finished.
static uint64_t ticket LINE;
static Body body LINE;
static void* closure;
static Group group;
static uint32_t finished LINE;  // the number of finished tasks: the futex of the caller
static uint32_t caller_sleeps;
static int32_t failed_task;  // a task that failed, or -1
static uint32_t loops LINE;  // the number of loops so far, which `stop` raises too: the futex of the workers
static uint32_t sleepers LINE;
static uint32_t is_busy LINE;  // whether a caller uses the pool

// What `start` and `stop` change, with `is_changing` held.
static uint32_t is_changing LINE;
static uint32_t users;
static uint32_t is_stopped;
static uint32_t worker_count;
static int owner;  // the process that started the workers
static int64_t looks;
static uint32_t* latest;  // the library of the process that ran a loop last, by its `self`
static Join join_thread;
static unsigned long workers[MOST_THREADS];

static uint32_t self(void) { return (uint32_t)(uintptr_t)&ticket; }

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

// Waits some moments for `word` to become different from `value`, and then gives the core to whoever waits for one;
// returns whether it has become different.
static int is_changed(const uint32_t* word, uint32_t value) {
  for (int i = 0; i < PAUSES; ++i) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return 1;
    relax();
  }
  sched_yield();
  return 0;
}

static void sleep_on(uint32_t* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(uint32_t* word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

// Takes the next task and runs it; returns whether there was one.
static int run_task(void) {
  uint64_t present = __atomic_load_n(&ticket, __ATOMIC_ACQUIRE);
  uint32_t task, tasks;
  do {
    task = present & 0xffff;
    tasks = (present >> 16) & 0xffff;
    if (task >= tasks) return 0;
  } while (!__atomic_compare_exchange_n(&ticket, &present, present + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  if (body((int)task, &group, closure) != 0) __atomic_store_n(&failed_task, (int32_t)task, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&finished, 1, __ATOMIC_SEQ_CST) == tasks &&
      __atomic_load_n(&caller_sleeps, __ATOMIC_SEQ_CST)) {
    wake(&finished, 1);
  }
  return 1;
}

// Looks for a loop after number `seen`, as long as no other library of the process runs one; returns whether there is one.
static int is_called(uint32_t seen) {
  for (int64_t look = 0; look < looks && __atomic_load_n(latest, __ATOMIC_RELAXED) == self(); ++look) {
    if (is_changed(&loops, seen)) return 1;
  }
  return 0;
}

static void* work(void* argument) {
  // Signals are for the threads of the program.
  uint64_t all = ~(uint64_t)0;
  syscall(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, &all, NULL, sizeof all);
  prctl(PR_SET_NAME, "tvmflow", 0, 0, 0);
  while (!__atomic_load_n(&is_stopped, __ATOMIC_ACQUIRE)) {
    const uint32_t seen = __atomic_load_n(&loops, __ATOMIC_ACQUIRE);
    while (run_task()) continue;
    if (is_called(seen)) continue;
    __atomic_add_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
    sleep_on(&loops, seen);
    __atomic_sub_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
  }
  return argument;
}

static void wait_for(uint32_t tasks) {
  uint32_t value;
  for (int64_t look = 0; look < looks; ++look) {
    value = __atomic_load_n(&finished, __ATOMIC_ACQUIRE);
    if (value == tasks) return;
    is_changed(&finished, value);
  }
  __atomic_store_n(&caller_sleeps, 1, __ATOMIC_SEQ_CST);
  while ((value = __atomic_load_n(&finished, __ATOMIC_SEQ_CST)) != tasks) sleep_on(&finished, value);
  __atomic_store_n(&caller_sleeps, 0, __ATOMIC_RELAXED);
}

static int run_alone(Body alone, void* its_closure, int tasks) {
  Group its_group = {NULL, tasks > 0 ? tasks : 1};
  for (int task = 0; task < its_group.num_task; ++task) {
    const int status = alone(task, &its_group, its_closure);
    if (status != 0) return status;
  }
  return 0;
}

// TVM's TVMBackendParallelLaunch: runs `tasks` tasks of a loop, as many as there are threads for 0; returns 0, or the
// status of a task that failed, whose error is raised in the calling thread.
static int launch(Body loop, void* its_closure, int tasks) {
  const uint32_t count = __atomic_load_n(&worker_count, __ATOMIC_ACQUIRE);
  if (count == 0 || tasks == 1 || tasks > 0xffff || owner != (int)getpid() ||
      __atomic_exchange_n(&is_busy, 1, __ATOMIC_ACQUIRE)) {
    return run_alone(loop, its_closure, tasks);
  }
  if (__atomic_load_n(latest, __ATOMIC_RELAXED) != self()) __atomic_store_n(latest, self(), __ATOMIC_RELAXED);
  body = loop;
  closure = its_closure;
  group.num_task = tasks > 0 ? tasks : (int32_t)count + 1;
  finished = 0;
  failed_task = -1;
  const uint32_t all = (uint32_t)group.num_task;
  const uint64_t number = (__atomic_load_n(&ticket, __ATOMIC_RELAXED) >> 32) + 1;
  __atomic_store_n(&ticket, number << 32 | (uint64_t)all << 16, __ATOMIC_RELEASE);
  __atomic_add_fetch(&loops, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) wake(&loops, (int)all - 1);
  while (run_task()) continue;
  wait_for(all);
  // An error is a variable of the thread that raised it: the task is run again for its error in this one.
  const int status = failed_task < 0 ? 0 : loop(failed_task, &group, its_closure);
  __atomic_store_n(&is_busy, 0, __ATOMIC_RELEASE);
  return status;
}

static void begin_change(void) {
  while (__atomic_exchange_n(&is_changing, 1, __ATOMIC_ACQUIRE)) sched_yield();
}

static void end_change(void) { __atomic_store_n(&is_changing, 0, __ATOMIC_RELEASE); }

// A function of TVM's calling convention with the arguments
// - threads: the number of threads of a call with the caller's own,
// - looks: how often an idle thread looks for work before it sleeps,
// - the addresses of pthread_create and pthread_join,
// - the address of 32 bits that all libraries of the process share: a thread looks for work no longer when another library
//   has some, so that models which take turns leave the cores to each other.
// Every user of the library starts and stops the threads once. The pool grows to the largest number of all users, and
// has the looks of the first. Returns the number of threads, which is smaller where the system gives no more.
EXPORT int __tvm_ffi_tvmflow_start_threads(void* self, const Any* arguments, int32_t count, Any* result) {
  (void)self;
  if (count != 5) return -1;
  int64_t threads = arguments[0].value;
  const Create create_thread = (Create)arguments[2].value;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  begin_change();
  if (owner != (int)getpid()) {
    // The first user of this process: the workers of a parent do not run here, and its call never ends here.
    owner = (int)getpid();
    users = worker_count = is_stopped = sleepers = caller_sleeps = is_busy = 0;
    ticket = 0;
  }
  if (users++ == 0) {
    looks = arguments[1].value;
    latest = (uint32_t*)arguments[4].value;
    join_thread = (Join)arguments[3].value;
    __TVMBackendParallelLaunch = launch;
  }
  while ((int64_t)worker_count + 1 < threads &&
         create_thread(&workers[worker_count], NULL, work, NULL) == 0) {
    __atomic_add_fetch(&worker_count, 1, __ATOMIC_RELEASE);
  }
  result->type_index = INTEGER;
  result->value = (int64_t)worker_count + 1;
  end_change();
  return 0;
}

// Ends the threads when the last user stops them; a parallel loop of a call that still runs goes on without them.
EXPORT int __tvm_ffi_tvmflow_stop_threads(void* self, const Any* arguments, int32_t count, Any* result) {
  (void)self, (void)arguments, (void)count, (void)result;
  begin_change();
  if (owner == (int)getpid() && users > 0 && --users == 0) {
    const uint32_t ending = worker_count;
    __atomic_store_n(&worker_count, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&is_stopped, 1, __ATOMIC_RELEASE);
    __atomic_add_fetch(&loops, 1, __ATOMIC_SEQ_CST);
    wake(&loops, MOST_THREADS);
    for (uint32_t i = 0; i < ending; ++i) join_thread(workers[i], NULL);
    __atomic_store_n(&is_stopped, 0, __ATOMIC_RELEASE);
  }
  end_change();
  return 0;
}

#ifdef __cplusplus
}
#endif
