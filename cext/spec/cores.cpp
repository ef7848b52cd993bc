// How many threads a process may compute with, on Linux.
//
// What limits it: its affinity mask, the time that its cgroups grant (v1 and v2), and hardware
// threads that share a core: matrix products gain nothing from the second one. Where a limit cannot
// be read there is none.

#include "internal.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace drafthouse {

namespace {

// The first line of a file of /proc or /sys; empty where there is none.
std::string first_line(const std::string & path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// The numbers of a list such as "0-3,8"; empty where it is none.
std::set<int32_t> parse_list(const std::string & text) {
    constexpr int32_t N_MAX = 1 << 16;
    std::set<int32_t> found;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
        std::istringstream numbers(part);
        int32_t first = -1;
        int32_t last = -1;
        char dash = 0;
        if (!(numbers >> first)) {
            return {};
        }
        if (!(numbers >> dash >> last)) {
            last = first;
        } else if (dash != '-') {
            return {};
        }
        if (first < 0 || last < first || last >= N_MAX) {
            return {};
        }
        for (int32_t i = first; i <= last; ++i) {
            found.insert(i);
        }
    }
    return found;
}

// The hardware threads of the calling thread's affinity mask; empty where the system tells none.
std::set<int32_t> allowed() {
    std::set<int32_t> found;
#ifdef __linux__
    for (int n = 1024; n <= 1 << 16; n *= 2) { // the kernel refuses a mask that is too small
        cpu_set_t * mask = CPU_ALLOC(static_cast<size_t>(n));
        const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(n));
        const bool is_read = mask != nullptr && sched_getaffinity(0, size, mask) == 0;
        for (int i = 0; is_read && i < n; ++i) {
            if (CPU_ISSET_S(static_cast<size_t>(i), size, mask)) {
                found.insert(i);
            }
        }
        CPU_FREE(mask);
        if (is_read) {
            break;
        }
    }
#endif
    return found;
}

// How many cores the hardware threads are. Of a processor with cores of two kinds, the quick ones.
int32_t count_cores(const std::string & root, const std::set<int32_t> & threads) {
    const std::string devices = root + "/sys/devices/";
    const std::set<int32_t> quick = parse_list(first_line(devices + "cpu_core/cpus"));
    std::set<int32_t> counted;
    std::set_intersection(threads.begin(), threads.end(), quick.begin(), quick.end(),
                          std::inserter(counted, counted.end()));
    std::set<std::string> found;
    for (const int32_t i : counted.empty() ? threads : counted) {
        const std::string number = std::to_string(i);
        const std::string siblings =
            first_line(devices + "system/cpu/cpu" + number + "/topology/thread_siblings_list");
        found.insert(siblings.empty() ? "alone " + number : siblings);
    }
    return static_cast<int32_t>(found.size());
}

// Cores' worth of time that one cgroup grants; infinite where it sets no limit.
double group_quota(const std::string & folder, bool is_v2) {
    constexpr double NONE = std::numeric_limits<double>::infinity();
    double quota_us = -1.0;
    double period_us = 0.0;
    if (is_v2) {
        std::istringstream(first_line(folder + "/cpu.max")) >> quota_us >> period_us;
    } else {
        std::istringstream(first_line(folder + "/cpu.cfs_quota_us")) >> quota_us;
        std::istringstream(first_line(folder + "/cpu.cfs_period_us")) >> period_us;
    }
    return quota_us > 0.0 && period_us > 0.0 ? quota_us / period_us : NONE;
}

// The least that a group and those around it grant. A container may see its own group's path and
// yet find its files at the top, so that is always looked at.
double path_quota(const std::string & mount, std::string path, bool is_v2) {
    double least = group_quota(mount, is_v2);
    while (path.size() > 1) {
        least = std::min(least, group_quota(mount + path, is_v2));
        path.resize(path.rfind('/'));
    }
    return least;
}

// Whether a line of /proc/self/cgroup, "number:controllers:path", is of this controller.
bool has_controller(const std::string & controllers, const std::string & wanted) {
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
        if (name == wanted) {
            return true;
        }
    }
    return false;
}

// Cores' worth of time that the process's cgroups grant; infinite without a limit.
double find_quota(const std::string & root) {
    const std::string mounts = root + "/sys/fs/cgroup";
    double least = std::numeric_limits<double>::infinity();
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t i = line.find(':');
        const size_t j = i == std::string::npos ? i : line.find(':', i + 1);
        if (j == std::string::npos || j + 1 >= line.size() || line[j + 1] != '/') {
            continue;
        }
        const std::string controllers = line.substr(i + 1, j - i - 1);
        const std::string path = line.substr(j + 1);
        if (controllers.empty()) {
            for (const char * mount : {"", "/unified"}) {
                least = std::min(least, path_quota(mounts + mount, path, true));
            }
        } else if (has_controller(controllers, "cpu")) {
            for (const std::string & mount : {std::string("cpu"), controllers}) {
                least = std::min(least, path_quota(mounts + "/" + mount, path, false));
            }
        }
    }
    return least;
}

// What a process may compute on. `root` stands before /proc and /sys, `cpus` in place of the
// process's own affinity mask; both empty but in tests.
spec_cores find_cores(const std::string & root, const std::string & cpus) {
    const std::set<int32_t> threads = cpus.empty() ? allowed() : parse_list(cpus);
    spec_cores found = {};
    if (threads.empty()) {
        found.n_logical = std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
        found.n_physical = found.n_logical;
    } else {
        found.n_logical = static_cast<int32_t>(threads.size());
        found.n_physical = count_cores(root, threads);
    }
    const double quota = find_quota(root);
    found.quota = std::isfinite(quota) ? quota : 0.0;
    // Down: a thread more than is paid for would stop all of them, part of the time.
    const double paid = std::min(std::floor(quota), static_cast<double>(found.n_physical));
    found.n_cores = std::max(1, static_cast<int32_t>(paid));
    return found;
}

} // namespace

int32_t all_cores() {
    return find_cores("", "").n_cores;
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_find_cores(const char * root, const char * cpus, spec_cores * out) {
    return guarded([&] {
        spec_cores & found = deref(out, "out");
        found = find_cores(root != nullptr ? root : "", cpus != nullptr ? cpus : "");
    });
}

} // extern "C"
