/*
 * Loaded into linux.uml (LD_PRELOAD): sets registers on processors that have more of them than it knows.
 *
 * User-Mode Linux 6.1 keeps at most 2,696 bytes of a process's extended registers (up to AVX-512 and protection keys). The host's
 * PTRACE_SETREGSET accepts the whole XSAVE area only, 11,008 bytes where the processor has AMX, and fails with EFAULT otherwise
 * (arch/x86/kernel/fpu/regset.c, xstateregs_set), which the kernel reports as "ptrace set fp regs failed, errno = 14" before it
 * panics. This passes on the whole area: what it does not keep is zero, the initial state of registers that nobody inside uses.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static long (*next_ptrace)(int, ...);
/* Static, since the kernel calls from small stacks. It has one thread. */
static char area[65536] __attribute__((aligned(64)));
static size_t area_size;

__attribute__((constructor)) static void find_next(void)
{
	next_ptrace = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	int pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE)
		return next_ptrace(request, pid, address, data);

	const struct iovec *given = data;
	if (area_size == 0) {
		struct iovec whole = { area, sizeof(area) };
		if (next_ptrace(PTRACE_GETREGSET, pid, address, &whole) < 0)
			return -1;
		area_size = whole.iov_len;
	}
	if (given->iov_len >= area_size)
		return next_ptrace(request, pid, address, data);
	memcpy(area, given->iov_base, given->iov_len);
	memset(area + given->iov_len, 0, area_size - given->iov_len);
	struct iovec whole = { area, area_size };
	return next_ptrace(request, pid, address, &whole);
}
