// The turn of pairs.c with torch's own allocator, without Python. scripts/bench builds it, where torch is installed.
//
//   torch_pairs SIZE THREADS SECONDS
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;

enum phase { WARM, MEASURE, END };
static std::atomic<int> phase{WARM}, ready{0};

static void turn(size_t size, double *ret_ns)
{
    constexpr size_t live = 16;
    c10::cuda::set_device(0);
    void *block[live];
    for (auto &b : block)
        b = allocator::raw_alloc(size);
    ready++;
    auto exchange_until = [&](int next) {
        unsigned long pairs = 0;
        do {
            void *&b = block[pairs % live];
            allocator::raw_delete(b);
            b = allocator::raw_alloc(size);
            pairs++;
        } while (phase.load(std::memory_order_relaxed) < next);
        return pairs;
    };
    exchange_until(MEASURE);
    auto start = std::chrono::steady_clock::now();
    auto pairs = exchange_until(END);
    *ret_ns =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / double(pairs);
    for (auto &b : block)
        allocator::raw_delete(b);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t size = strtoull(argv[1], nullptr, 0);
    int count = atoi(argv[2]);
    double seconds = atof(argv[3]);
    allocator::init(c10::cuda::device_count());
    std::vector<std::thread> threads;
    std::vector<double> ns(count);
    for (int t = 0; t < count; t++)
        threads.emplace_back(turn, size, &ns[t]);
    while (ready < count)
        std::this_thread::yield();
    for (int next : {MEASURE, END}) {
        std::this_thread::sleep_for(std::chrono::duration<double>(next == MEASURE ? seconds / 4 : seconds));
        phase = next;
    }
    for (auto &t : threads)
        t.join();
    std::sort(ns.begin(), ns.end());
    printf("{\"name\": \"turn\", \"api\": \"torch\", \"size\": %zu, \"threads\": %d, \"live\": 16, \"ns\": [%.2f]}\n",
           size, count, (ns[(count - 1) / 2] + ns[count / 2]) / 2);
}
